"""The Ape-X loss over single n-step transitions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpcrl.agents import LossOutput
from hpcrl.agents.apex.config import ApexConfig
from hpcrl.agents.q_loss import inputs_of, metrics, recorded_td_error, targets
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.q_targets import double_q_value, of_action
from hpcrl.types import NetInputs, UnrollBatch


def loss(
    net: nn.Module,
    distribution: ActionDistribution,
    batch: UnrollBatch,
    config: ApexConfig,
    generator: torch.Generator | None = None,
    target: nn.Module | None = None,
) -> LossOutput:
    """Return the weighted loss summed over transitions: w 0.5 delta^2 of row 0.

    Args:
      net: an action-value network without a recurrent core.
      distribution: not used.
      batch: n+1 rows, with their `weight`; row 0 is never the last of a truncated episode.
      config: the agent's parameters.
      generator: not used.
      target: the target network.

    Returns:
      Sums over transitions, their priorities |delta|, and the metrics of `q_loss.summarize`.
    """
    assert target is not None
    weight = batch.behaviour["weight"][0]
    q, _ = net(inputs_of(batch, 0, 1), batch.core_state)
    last = bootstrap_row(batch.final)
    inputs = rows_at(batch, last)
    with torch.no_grad():
        online, _ = net(inputs, batch.core_state)
        value = double_q_value(online, target(inputs, batch.core_state)[0])
        # Only the row that row 0's target bootstraps from needs a value.
        values = torch.zeros_like(batch.reward).scatter_(0, last[None], value)
    goals, masks = targets(batch.reward, batch.terminated, batch.final, values, config)
    goal, real = goals[:1], masks.real[:1]
    q_action = of_action(q, batch.action[:1])
    td_error = (goal - q_action) * real
    return LossOutput(
        (weight * 0.5 * td_error.square()).sum(),
        torch.tensor(float(td_error.shape[1]), device=td_error.device),
        metrics(q_action.detach(), goal, td_error.detach(), real, weight),
        td_error.detach().abs()[0],
    )


def bootstrap_row(final: Tensor) -> Tensor:
    """Return `<int64>[B]`, the first row after row 0 that ends a truncated episode, else the last.

    Args:
      final: `<bool>[n+1, B]`.
    """
    ends = final.clone()
    ends[0], ends[-1] = False, True
    return ends.to(torch.uint8).argmax(0)


def rows_at(batch: UnrollBatch, row: Tensor) -> NetInputs:
    """Return one row per column, `[1, B, ...]`, for `row` of `<int64>[B]`."""
    columns = torch.arange(len(row), device=row.device)
    return NetInputs(
        {path: leaf[row, columns][None] for path, leaf in batch.observation.items()},
        batch.reward[row, columns][None],
        batch.previous_action[row, columns][None],
        batch.start[row, columns][None],
    )


def initial_priorities(rows: Mapping[str, Tensor], config: ApexConfig) -> Tensor:
    """Return |delta| of each transition, `<float32>[n, T]`, -1 where it is not real.

    Args:
      rows: `[n-1 + T+1, B]`; see `agents.ReplayAgent.initial_priorities`.
      config: the agent's parameters.
    """
    td_error, masks = recorded_td_error(rows, config)
    priority = torch.where(masks.real, td_error.abs(), -1.0)
    # The item that ends with row t of the unroll begins n-1 rows earlier.
    unroll_steps = len(td_error) - (config.num_steps - 1)
    return priority[:unroll_steps].T.contiguous()
