"""The PPO agent as the roles see it."""

from __future__ import annotations

from hpcrl.agents import EpochAgent, policy_acting
from hpcrl.agents.ppo import loss as losses
from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.config.sections import NetworkConfig
from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.nets.normalized import NormalizedActorCritic
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import EnvSpec


def make_network(
    env: EnvSpec, distribution: ActionDistribution, network: NetworkConfig, config: PPOConfig
) -> ActorCritic:
    """Build the actor-critic; see `agents.Agent.make_network`."""
    if config.normalize_observations:
        settings = policy_acting.network_settings(network)
        return NormalizedActorCritic(env, distribution, config.observation_clip, **settings)
    return policy_acting.make_network(env, distribution, network, config)


class PPOAgent:
    """Satisfies `hpcrl.agents.EpochAgent`."""

    behaviour_spec = staticmethod(policy_acting.behaviour_spec)
    make_network = staticmethod(make_network)
    exploration = staticmethod(policy_acting.exploration)
    act = staticmethod(policy_acting.act)
    prepare = staticmethod(losses.prepare)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(losses.summarize)


AGENT: EpochAgent = PPOAgent()
