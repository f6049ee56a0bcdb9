"""The V-trace agent as the roles see it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpcrl.agents import Agent
from hpcrl.agents.vtrace import acting
from hpcrl.agents.vtrace import loss as losses
from hpcrl.agents.vtrace.config import VTraceConfig
from hpcrl.config.sections import NetworkConfig
from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import EnvSpec


def make_network(
    env: EnvSpec, distribution: ActionDistribution, network: NetworkConfig, config: VTraceConfig
) -> ActorCritic:
    """Build the actor-critic; see `agents.Agent.make_network`."""
    return ActorCritic(
        env,
        distribution,
        torso=network.torso,
        hidden_sizes=network.hidden_sizes,
        activation=network.activation,
        shared_torso=network.shared_torso,
        core=network.core,
        core_size=network.core_size,
        use_previous_action=network.use_previous_action,
        use_previous_reward=network.use_previous_reward,
        previous_reward_clip=network.previous_reward_clip,
        state_independent_std=network.state_independent_std,
    )


def exploration(env_ids: npt.NDArray[np.int64], num_envs: int, config: VTraceConfig) -> None:
    """Return None: the policy itself explores."""


class VTraceAgent:
    """Satisfies `hpcrl.agents.Agent`."""

    behaviour_spec = staticmethod(acting.behaviour_spec)
    make_network = staticmethod(make_network)
    exploration = staticmethod(exploration)
    act = staticmethod(acting.act)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(losses.summarize)


AGENT: Agent = VTraceAgent()
