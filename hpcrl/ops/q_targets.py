"""Targets of action values: double Q, n steps, rescaled values; and their priorities.

Sources: double Q, van Hasselt et al. 2016, arXiv:1509.06461; R2D2, Kapturowski et al. 2019,
section 2.3 and eq. (1); value rescaling, arXiv:1805.11593. Rows and transitions are those of
`hpcrl.ops.masks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.checks import check_same_shape
from hpcrl.ops.rescale import inverse_rescale, rescale
from hpcrl.ops.returns import n_step_returns


def of_action(q: Tensor, action: Tensor) -> Tensor:
    """Return the values `[...]` of the actions `[..., 1]` among `q` `[..., actions]`."""
    return q.gather(-1, action.long())[..., 0]


def double_q_value(q_online: Tensor, q_target: Tensor) -> Tensor:
    """Return the target network's value `[...]` of the action that the online one prefers."""
    check_same_shape(q_online=q_online, q_target=q_target)
    return of_action(q_target, q_online.argmax(-1, keepdim=True))


@torch.no_grad()
def n_step_targets(
    reward_t: Tensor,
    discount_t: Tensor,
    value: Tensor,
    num_steps: int,
    real: Tensor,
    rescale_epsilon: float | None,
) -> Tensor:
    """Return h(r + discount r + ... + (product of n discounts) h^-1(value of row t+n)).

    The last n-1 transitions have fewer rows left: their targets take n-1 .. 1 steps and
    bootstrap from the last row. A window that meets the last observation of a truncated
    episode bootstraps there.

    Args:
      reward_t: `<float32>[T, B]`.
      discount_t: `<float32>[T, B]`, 0 where the transition terminated the episode.
      value: `<float32>[T+1, B]`, rescaled value of every row.
      num_steps: n.
      real: `<bool>[T, B]`.
      rescale_epsilon: of h; None: h is the identity.

    Returns:
      `<float32>[T, B]`, rescaled; a row's own value where not real.
    """
    plain = value if rescale_epsilon is None else inverse_rescale(value, rescale_epsilon)
    returns = n_step_returns(reward_t, discount_t, plain[:-1], plain[-1], num_steps, real)
    return returns if rescale_epsilon is None else rescale(returns, rescale_epsilon)


@torch.no_grad()
def mixed_priority(td_error: Tensor, real: Tensor, eta: float) -> Tensor:
    """Return eta max |delta| + (1 - eta) mean |delta| over the real transitions, `[B]`.

    Args:
      td_error: `<float32>[T, B]`.
      real: `<bool>[T, B]`; a column without any has priority 0.
      eta: weight of the largest error, R2D2 uses 0.9.
    """
    size = td_error.abs() * real
    mean = size.sum(0) / real.sum(0).clamp(min=1)
    return eta * size.amax(0) + (1 - eta) * mean
