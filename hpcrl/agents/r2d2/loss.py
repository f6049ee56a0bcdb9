"""The R2D2 loss over replayed sequences: burn-in, double Q, n-step rescaled targets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpcrl.agents import LossOutput
from hpcrl.agents.q_loss import inputs_of, metrics, recorded_td_error, targets
from hpcrl.agents.r2d2.config import R2D2Config
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.q_targets import double_q_value, mixed_priority, of_action
from hpcrl.types import UnrollBatch


def loss(
    net: nn.Module,
    distribution: ActionDistribution,
    batch: UnrollBatch,
    config: R2D2Config,
    generator: torch.Generator | None = None,
    target: nn.Module | None = None,
) -> LossOutput:
    """Return the weighted loss summed over sequences: w 0.5 (sum over time of delta^2).

    Both networks start from the same stored state and burn in with their own weights. Rows
    before the first of a run are zeros; its first row starts an episode, which resets the
    state, so they leave no trace.

    Args:
      net: an action-value network.
      distribution: not used.
      batch: sequences of burn-in rows, T loss rows and one more, with their `weight`.
      config: the agent's parameters.
      generator: not used.
      target: the target network.

    Returns:
      Sums over sequences, their priorities, and the metrics of `q_loss.summarize`.
    """
    assert target is not None
    weight = batch.behaviour["weight"][0]
    online_state, target_state = _burn_in(net, target, batch, config.burn_in_steps)
    first = config.burn_in_steps
    inputs = inputs_of(batch, first, None)
    q, _ = net(inputs, online_state)
    with torch.no_grad():
        q_target, _ = target(inputs, target_state)
        value = double_q_value(q, q_target)
    goal, masks = targets(
        batch.reward[first:], batch.terminated[first:], batch.final[first:], value, config
    )
    q_action = of_action(q[:-1], batch.action[first:-1])
    td_error = (goal - q_action) * masks.real
    loss_sum = (weight * 0.5 * td_error.square().sum(0)).sum()
    return LossOutput(
        loss_sum,
        torch.tensor(float(td_error.shape[1]), device=td_error.device),
        metrics(q_action.detach(), goal, td_error.detach(), masks.real, weight),
        mixed_priority(td_error, masks.real, config.priority_eta),
    )


@torch.no_grad()
def _burn_in(
    net: nn.Module, target: nn.Module, batch: UnrollBatch, num_rows: int
) -> tuple[Tensor, Tensor]:
    if num_rows == 0:
        return batch.core_state, batch.core_state
    inputs = inputs_of(batch, 0, num_rows)
    return net(inputs, batch.core_state)[1], target(inputs, batch.core_state)[1]


def initial_priorities(rows: Mapping[str, Tensor], config: R2D2Config) -> Tensor:
    """Return the priority of each of n unrolls, `<float32>[n, 1]`, from what acting recorded.

    Targets bootstrap from the value of the GREEDY action, as the loss does.

    Args:
      rows: `[T+1, n]`; see `agents.ReplayAgent.initial_priorities`.
      config: the agent's parameters.
    """
    td_error, masks = recorded_td_error(rows, config)
    return mixed_priority(td_error, masks.real, config.priority_eta)[:, None]
