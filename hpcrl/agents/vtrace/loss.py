"""The V-trace loss: policy gradient, value regression and entropy bonus over unrolls.

Source: IMPALA, arXiv:1802.01561, section 4.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hpcrl.agents import LossOutput
from hpcrl.agents.value_means import value_means
from hpcrl.agents.vtrace.config import VTraceConfig
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.masks import transition_masks
from hpcrl.ops.vtrace import VTraceReturns, vtrace
from hpcrl.types import NetInputs, UnrollBatch


def loss(
    net: nn.Module,
    distribution: ActionDistribution,
    batch: UnrollBatch,
    config: VTraceConfig,
    generator: torch.Generator | None = None,
    target: nn.Module | None = None,
) -> LossOutput:
    """Return the loss summed over the real transitions of a batch.

    Per transition, with advantage and target v from V-trace, held constant:

        - advantage log pi(a) + value_cost (v - V)^2 / 2 - entropy_cost H(pi)
        + kl_cost KL(mu || pi)

    KL is estimated from the sampled action as rho - 1 - log rho (rho = pi/mu), which has the
    right expectation under mu, as has its gradient.

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

    log_pi = distribution.log_prob(policy, batch.action[:-1])
    log_rho = torch.where(real, log_pi - batch.behaviour["log_prob"][:-1], -math.inf)
    clip = config.reward_clip or math.inf
    # Row t of the unroll acts; its reward arrived at row t+1.
    reward_t = batch.reward[1:].clamp(-clip, clip)
    returns = vtrace(
        log_rho.detach(),
        discount_t,
        reward_t,
        value_tm1.detach(),
        outputs.value[-1].detach(),
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        pg_rho_bar=config.pg_rho_bar,
        lambda_=config.lambda_,
    )

    # Targets and advantages of transitions that are not real are neutral already.
    policy_loss = -(returns.pg_advantage * log_pi).sum()
    value_loss = 0.5 * (returns.vs - value_tm1).square().sum()
    entropy = (distribution.entropy(policy) * real).sum()
    loss_sum = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    if config.kl_cost > 0:
        kl = torch.where(real, log_rho.exp() - 1 - log_rho, 0.0)
        loss_sum = loss_sum + config.kl_cost * kl.sum()

    metrics = {
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach(),
        **_metrics(log_rho.detach(), returns, value_tm1.detach(), real, config.rho_bar),
    }
    return LossOutput(loss_sum, real.sum(dtype=torch.float32), metrics)


def summarize(sums: dict[str, float], count: float) -> dict[str, float]:
    """Return means per real transition, and the value's explained variance.

    Args:
      sums: the metrics of `loss`, summed over a global batch.
      count: its real transitions.

    Returns:
      policy_loss, value_loss and entropy before their costs; `kl`, of the policy from the one
      that acted; `rho`, the mean unclipped importance weight, and `rho_clipped`, how often
      rho_bar cut it; `advantage`; `value_target`; and `explained_variance`,
      1 - Var(target - value) / Var(target), 0 when targets do not vary.
    """
    return value_means(sums, count)


@torch.no_grad()
def _metrics(
    log_rho: Tensor, returns: VTraceReturns, value: Tensor, real: Tensor, rho_bar: float
) -> dict[str, Tensor]:
    rho = log_rho.exp()
    target = returns.vs * real
    error = returns.vs - value  # 0 where not real
    return {
        "kl": -torch.where(real, log_rho, 0.0).sum(),
        "rho": rho.sum(),
        "rho_clipped": (rho > rho_bar).sum(dtype=torch.float32),
        "advantage": returns.pg_advantage.sum(),
        "value_target": target.sum(),
        "value_target_squared": target.square().sum(),
        "value_error": error.sum(),
        "value_error_squared": error.square().sum(),
    }
