"""The PPO loss over prepared rows, and the preparation of unrolls.

Source: Schulman et al. 2017, arXiv:1707.06347, equations (7) and (9).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hpcrl.agents import LossOutput
from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.agents.value_means import value_means
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.masks import transition_masks
from hpcrl.ops.returns import gae
from hpcrl.types import NetInputs, UnrollBatch


@torch.no_grad()
def prepare(batch: UnrollBatch, config: PPOConfig) -> UnrollBatch:
    """Return the rows that act, with what every epoch needs of them.

    Values are those that acting recorded: with no policy lag they are the network's own.

    Args:
      batch: unrolls of T+1 rows.
      config: the agent's parameters.

    Returns:
      T rows, or, where transitions are shuffled, a single row of all that are real, `[1, N]`.
      `behaviour` also holds `advantage` and `value_target`, `<float32>[T, B]`.
    """
    discount_t, real = transition_masks(batch.terminated, batch.final, config.discount)
    clip = config.reward_clip or math.inf
    value = batch.behaviour["value"]
    advantage = gae(
        batch.reward[1:].clamp(-clip, clip),
        discount_t,
        value[:-1],
        value[-1],
        config.lambda_,
        real,
    )
    extra = {"advantage": advantage, "value_target": advantage + value[:-1]}

    def kept(tensor: Tensor) -> Tensor:
        rows = tensor[: len(real)]
        return rows[real][None] if config.minibatch_over == "transitions" else rows

    named = batch._asdict()
    del named["observation"], named["behaviour"], named["core_state"]
    core_state = batch.core_state
    if config.minibatch_over == "transitions":
        core_state = core_state.new_zeros(int(real.sum()), core_state.shape[1])
    return UnrollBatch(
        observation={path: kept(leaf) for path, leaf in batch.observation.items()},
        behaviour={name: kept(leaf) for name, leaf in (batch.behaviour | extra).items()},
        core_state=core_state,
        **{name: kept(tensor) for name, tensor in named.items()},
    )


def loss(
    net: nn.Module,
    distribution: ActionDistribution,
    batch: UnrollBatch,
    config: PPOConfig,
    generator: torch.Generator | None = None,
    target: nn.Module | None = None,
) -> LossOutput:
    """Return the loss summed over the real rows of a minibatch.

    Per row, with ratio r = pi / mu, advantage A and value target G:

        - min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) + value_cost (G - V)^2 / 2
        - entropy_cost H(pi)

    With `value_clip` the squared error is the larger one of V and of V kept within that
    distance of the value when acting.

    Args:
      net: an actor-critic network.
      distribution: of actions, given the network's policy output.
      batch: rows that `prepare` gave.
      config: the agent's parameters.
      generator: not used; part of the interface of agents.
      target: not used.

    Returns:
      Sums over real rows; metrics are those of `summarize`.
    """
    inputs = NetInputs(batch.observation, batch.reward, batch.previous_action, batch.start)
    outputs, _ = net(inputs, batch.core_state)
    real = ~batch.final
    advantage, value_target = batch.behaviour["advantage"], batch.behaviour["value_target"]

    log_pi = distribution.log_prob(outputs.policy, batch.action)
    log_ratio = torch.where(real, log_pi - batch.behaviour["log_prob"], 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    policy_loss = -torch.where(real, gain, 0.0).sum()

    error = torch.where(real, value_target - outputs.value, 0.0)
    squared = error.square()
    if config.value_clip > 0:
        before = batch.behaviour["value"]
        near = before + (outputs.value - before).clamp(-config.value_clip, config.value_clip)
        squared = torch.maximum(squared, torch.where(real, value_target - near, 0.0).square())
    value_loss = 0.5 * squared.sum()
    entropy = torch.where(real, distribution.entropy(outputs.policy), 0.0).sum()
    loss_sum = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy

    with torch.no_grad():
        value_target = torch.where(real, value_target, 0.0)
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": (ratio - 1 - log_ratio).sum(),
            "ratio_clipped": (ratio != clipped).sum(dtype=torch.float32),
            "value_target": value_target.sum(),
            "value_target_squared": value_target.square().sum(),
            "value_error": error.sum(),
            "value_error_squared": error.square().sum(),
        }
    metrics = {name: value.detach() for name, value in metrics.items()}
    return LossOutput(loss_sum, real.sum(dtype=torch.float32), metrics)


def summarize(sums: dict[str, float], count: float) -> dict[str, float]:
    """Return means per real row, and the value's explained variance.

    Args:
      sums: the metrics of `loss`, summed over a global minibatch.
      count: its real rows.

    Returns:
      policy_loss, value_loss and entropy before their costs; `kl` of the policy from the one
      that acted, estimated as r - 1 - log r; `ratio_clipped`, how often the ratio was beyond
      its bounds; `value_target`; and `explained_variance`, 1 - Var(target - value) /
      Var(target), 0 when targets do not vary.
    """
    return value_means(sums, count)
