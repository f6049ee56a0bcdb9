"""The A3C loss: policy gradient, value regression and entropy bonus over n-step returns.

Source: Mnih et al. 2016, arXiv:1602.01783, section 4 and algorithm S3.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from hpcrl.agents import LossOutput
from hpcrl.agents.a3c.config import A3CConfig
from hpcrl.agents.value_means import value_means
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.masks import transition_masks
from hpcrl.ops.returns import n_step_returns
from hpcrl.types import NetInputs, UnrollBatch

METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "advantage",
    "value_target",
    "value_target_squared",
    "value_error_squared",
)
"""Names of the metrics of `loss`, which travel with each gradient."""


def loss(
    net: nn.Module,
    distribution: ActionDistribution,
    batch: UnrollBatch,
    config: A3CConfig,
    generator: torch.Generator | None = None,
    target: nn.Module | None = None,
) -> LossOutput:
    """Return the loss summed over the real transitions of a batch.

    Per transition, with the n-step return G and the advantage A = G - V held constant:

        - A log pi(a) + value_cost (G - V)^2 / 2 - entropy_cost H(pi)

    The network must be the one that acted: nothing corrects for another.

    Args:
      net: an actor-critic network.
      distribution: of actions, given the network's policy output.
      batch: unrolls of T+1 rows.
      config: the agent's parameters.
      generator: not used; part of the interface of agents.
      target: not used.

    Returns:
      Sums over real transitions; metrics are those of `summarize`.
    """
    inputs = NetInputs(batch.observation, batch.reward, batch.previous_action, batch.start)
    outputs, _ = net(inputs, batch.core_state)
    policy, value_tm1 = outputs.policy[:-1], outputs.value[:-1]  # row T is only a bootstrap
    discount_t, real = transition_masks(batch.terminated, batch.final, config.discount)

    clip = config.reward_clip or math.inf
    returns = n_step_returns(
        # Row t of the unroll acts; its reward arrived at row t+1.
        batch.reward[1:].clamp(-clip, clip),
        discount_t,
        value_tm1.detach(),
        outputs.value[-1].detach(),
        config.n_steps or len(real),
        real,
    )
    # Of a transition that is not real the return is its own value: no advantage, no error.
    error = returns - value_tm1
    advantage = error.detach()
    policy_loss = -(advantage * distribution.log_prob(policy, batch.action[:-1])).sum()
    value_loss = 0.5 * error.square().sum()
    entropy = (distribution.entropy(policy) * real).sum()
    loss_sum = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy

    value_target = returns * real
    metrics = {
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach(),
        "advantage": advantage.sum(),
        "value_target": value_target.sum(),
        "value_target_squared": value_target.square().sum(),
        "value_error_squared": advantage.square().sum(),
    }
    return LossOutput(loss_sum, real.sum(dtype=torch.float32), metrics)


def summarize(sums: dict[str, float], count: float) -> dict[str, float]:
    """Return means per real transition, and the value's explained variance.

    Args:
      sums: the metrics of `loss`, summed over a batch.
      count: its real transitions.

    Returns:
      policy_loss, value_loss and entropy before their costs; `advantage`, which is also the
      value's error; `value_target`; and `explained_variance`, 1 - Var(target - value) /
      Var(target), 0 when targets do not vary.
    """
    return value_means({**sums, "value_error": sums["advantage"]}, count)
