"""On-policy returns and advantages that respect terminations and truncations.

Every function takes transitions, not episodes: row t is the transition from row t to row
t+1 of an unroll, `discount_t` is 0 where it terminated the episode, and `real` is false
where it only joins a truncated episode to the next (`hpcrl.ops.masks`). The return at such
a row is its own value, which is what the transition before bootstraps from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.checks import check_dtype, check_same_shape, check_shape


@torch.no_grad()
def n_step_returns(
    reward_t: Tensor,
    discount_t: Tensor,
    value_tm1: Tensor,
    bootstrap_value: Tensor,
    num_steps: int,
    real: Tensor | None = None,
) -> Tensor:
    """Return Gₜ = rₜ₊₁ + discountₜ₊₁ rₜ₊₂ + ... + (product of n discounts) V(xₜ₊ₙ).

    The last n-1 rows have fewer rewards left and bootstrap from `bootstrap_value`; a window
    that meets a row that is not real bootstraps there.

    Args:
      reward_t: `<float32>[T, B]`.
      discount_t: `<float32>[T, B]`.
      value_tm1: `<float32>[T, B]`, V at the rows where the transitions start.
      bootstrap_value: `<float32>[B]`, V at the row after the last transition.
      num_steps: n, at least 1.
      real: `<bool>[T, B]`; all true when absent.

    Returns:
      `<float32>[T, B]`, without gradient.

    Raises:
      ValueError: shapes differ, or `num_steps` is below 1.
      TypeError: an argument has the wrong dtype.
    """
    _check(reward_t, discount_t, value_tm1, bootstrap_value, real)
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; a return needs at least 1 step")
    returns = value_tm1
    for _ in range(min(num_steps, len(reward_t))):
        following = torch.cat([returns[1:], bootstrap_value[None]])
        returns = reward_t + discount_t * following
        if real is not None:
            returns = torch.where(real, returns, value_tm1)
    return returns


@torch.no_grad()
def gae(
    reward_t: Tensor,
    discount_t: Tensor,
    value_tm1: Tensor,
    bootstrap_value: Tensor,
    lambda_: float,
    real: Tensor | None = None,
) -> Tensor:
    """Return generalized advantages, Schulman et al. 2016, arXiv:1506.02438, eq. (16).

        deltaₜ = rₜ₊₁ + discountₜ₊₁ V(xₜ₊₁) - V(xₜ)
        Aₜ     = deltaₜ + discountₜ₊₁ lambda Aₜ₊₁

    Args:
      reward_t: `<float32>[T, B]`.
      discount_t: `<float32>[T, B]`.
      value_tm1: `<float32>[T, B]`, V at the rows where the transitions start.
      bootstrap_value: `<float32>[B]`, V at the row after the last transition.
      lambda_: in [0, 1].
      real: `<bool>[T, B]`; all true when absent.

    Returns:
      `<float32>[T, B]`, zero where not real, without gradient.

    Raises:
      ValueError: shapes differ.
      TypeError: an argument has the wrong dtype.
    """
    _check(reward_t, discount_t, value_tm1, bootstrap_value, real)
    value_t = torch.cat([value_tm1[1:], bootstrap_value[None]])
    delta = reward_t + discount_t * value_t - value_tm1
    trace = discount_t * lambda_
    if real is not None:
        delta = delta * real
        trace = trace * real
    advantage = torch.empty_like(delta)
    following = torch.zeros_like(bootstrap_value)
    for t in range(len(delta) - 1, -1, -1):
        following = torch.addcmul(delta[t], trace[t], following, out=advantage[t])
    return advantage


def lambda_returns(
    reward_t: Tensor,
    discount_t: Tensor,
    value_tm1: Tensor,
    bootstrap_value: Tensor,
    lambda_: float,
    real: Tensor | None = None,
) -> Tensor:
    """Return Gₜ = rₜ₊₁ + discountₜ₊₁ ((1 - lambda) V(xₜ₊₁) + lambda Gₜ₊₁).

    Equal to `gae` plus the value; lambda = 1 gives the discounted return to the end of the
    unroll. Source: Sutton & Barto 2018, eq. (12.2) in its recursive form.

    Args:
      reward_t: `<float32>[T, B]`.
      discount_t: `<float32>[T, B]`.
      value_tm1: `<float32>[T, B]`, V at the rows where the transitions start.
      bootstrap_value: `<float32>[B]`, V at the row after the last transition.
      lambda_: in [0, 1].
      real: `<bool>[T, B]`; all true when absent.

    Returns:
      `<float32>[T, B]`, without gradient.

    Raises:
      ValueError: shapes differ.
      TypeError: an argument has the wrong dtype.
    """
    advantage = gae(reward_t, discount_t, value_tm1, bootstrap_value, lambda_, real)
    return advantage + value_tm1.detach()


def _check(
    reward_t: Tensor,
    discount_t: Tensor,
    value_tm1: Tensor,
    bootstrap_value: Tensor,
    real: Tensor | None,
) -> None:
    check_same_shape(reward_t=reward_t, discount_t=discount_t, value_tm1=value_tm1)
    num_rows, batch_size = reward_t.shape
    check_shape("bootstrap_value", bootstrap_value, batch_size)
    for name, array in (
        ("reward_t", reward_t),
        ("discount_t", discount_t),
        ("value_tm1", value_tm1),
        ("bootstrap_value", bootstrap_value),
    ):
        check_dtype(name, array, torch.float32)
    if real is not None:
        check_shape("real", real, num_rows, batch_size)
        check_dtype("real", real, torch.bool)
