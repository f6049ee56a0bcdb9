"""What the losses of R2D2 and Ape-X share."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hpcrl.agents.q_learning import QLearningConfig
from hpcrl.ops.masks import TransitionMasks, transition_masks
from hpcrl.ops.q_targets import n_step_targets
from hpcrl.types import NetInputs, UnrollBatch


def inputs_of(batch: UnrollBatch, first: int, last: int | None) -> NetInputs:
    """Return rows `first:last` as the network sees them."""
    rows = slice(first, last)
    return NetInputs(
        {path: leaf[rows] for path, leaf in batch.observation.items()},
        batch.reward[rows],
        batch.previous_action[rows],
        batch.start[rows],
    )


def targets(
    reward: Tensor, terminated: Tensor, final: Tensor, value: Tensor, config: QLearningConfig
) -> tuple[Tensor, TransitionMasks]:
    """Return the n-step targets of T transitions, and their masks.

    Args:
      reward: `<float32>[T+1, B]`.
      terminated: `<bool>[T+1, B]`.
      final: `<bool>[T+1, B]`.
      value: `<float32>[T+1, B]`, rescaled value of every row.
      config: the agent's parameters.
    """
    masks = transition_masks(terminated, final, config.discount)
    clip = config.reward_clip or math.inf
    # Row t acts; its reward arrived at row t+1.
    reward_t = reward[1:].clamp(-clip, clip)
    target = n_step_targets(
        reward_t, masks.discount_t, value, config.num_steps, masks.real, config.h_epsilon
    )
    return target, masks


def recorded_td_error(
    rows: Mapping[str, Tensor], config: QLearningConfig
) -> tuple[Tensor, TransitionMasks]:
    """Return the errors `[T, B]` of what acting recorded in T+1 rows, and the masks."""
    target, masks = targets(
        rows["reward"], rows["terminated"], rows["final"], rows["q_greedy"], config
    )
    return (target - rows["q_action"][:-1]) * masks.real, masks


@torch.no_grad()
def metrics(
    q: Tensor, target: Tensor, td_error: Tensor, real: Tensor, weight: Tensor
) -> dict[str, Tensor]:
    """Return sums over real transitions `[T, B]`, and over items `[B]` of the weights."""
    return {
        "q": (q * real).sum(),
        "target": (target * real).sum(),
        "td_error_size": (td_error.abs() * real).sum(),
        "transitions": real.sum(dtype=torch.float32),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
    }


def summarize(sums: dict[str, float], count: float) -> dict[str, float]:
    """Return means per transition, and of the importance weights.

    Args:
      sums: the metrics of the loss, summed over a global batch.
      count: its items.

    Returns:
      q, target and td_error_size in rescaled units; `weight`, the mean importance weight
      relative to the largest of the batch; and `effective_items`, (sum w)^2 / sum w^2, of
      how many equally weighted items the batch is worth.
    """
    transitions = max(sums["transitions"], 1.0)
    means = {name: sums[name] / transitions for name in ("q", "target", "td_error_size")}
    squared = sums["weight_squared"]
    return means | {
        "weight": sums["weight"] / max(count, 1.0),
        "effective_items": sums["weight"] ** 2 / squared if squared > 0 else 0.0,
    }
