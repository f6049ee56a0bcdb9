"""The Ape-X DQN agent as the roles see it."""

from __future__ import annotations

from hpcrl.agents import ReplayAgent, ReplayWindow, q_acting, q_loss
from hpcrl.agents.apex import loss as losses
from hpcrl.agents.apex.config import ApexConfig
from hpcrl.config.sections import NetworkConfig
from hpcrl.nets.q_network import QNetwork
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import EnvSpec


def make_network(
    env: EnvSpec, distribution: ActionDistribution, network: NetworkConfig, config: ApexConfig
) -> QNetwork:
    """Build the dueling network; see `agents.Agent.make_network`."""
    if network.core != "none":
        raise ValueError(
            f"network.core {network.core}: agent apex learns from single transitions and carries "
            "no state; use r2d2, or core: none"
        )
    return q_acting.make_network(env, distribution, network, config)


def window(config: ApexConfig, unroll_steps: int) -> ReplayWindow:
    """Return one item per step: n rows and the one to bootstrap from."""
    return ReplayWindow(0, config.num_steps, config.items_per_unroll(unroll_steps), True)


class ApexAgent:
    """Satisfies `hpcrl.agents.ReplayAgent`."""

    behaviour_spec = staticmethod(q_acting.behaviour_spec)
    make_network = staticmethod(make_network)
    exploration = staticmethod(q_acting.exploration)
    act = staticmethod(q_acting.act)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(q_loss.summarize)
    window = staticmethod(window)
    initial_priorities = staticmethod(losses.initial_priorities)


AGENT: ReplayAgent = ApexAgent()
