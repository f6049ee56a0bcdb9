"""An agent bound to an environment and a configuration: network, acting, loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpcrl.agents import ActOutput, LossOutput, load_agent
from hpcrl.config.root import Config
from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ArraySpec, EnvSpec
from hpcrl.types import NetInputs, UnrollBatch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of `precision`; none for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])


class Brain:
    """The algorithm as the roles use it; holds no parameters."""

    def __init__(self, config: Config, env: EnvSpec):
        self._config = config
        self._env = env
        self._agent = load_agent(config.agent.name)
        self.distribution = ActionDistribution(env.action, config.network.continuous)

    def make_network(self, seed: int) -> ActorCritic:
        """Build the network with initial weights that depend on `seed` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self._config.network
            return ActorCritic(
                self._env,
                self.distribution,
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

    @property
    def behaviour(self) -> dict[str, ArraySpec]:
        """What acting records per row."""
        return self._agent.behaviour_spec()

    def act(
        self,
        network: ActorCritic,
        inputs: NetInputs,
        core_state: torch.Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> ActOutput:
        """Choose actions for one step of N rows; see `agents.Agent.act`."""
        return self._agent.act(network, self.distribution, inputs, core_state, generator, greedy)

    def loss(
        self, network: ActorCritic, batch: UnrollBatch, generator: torch.Generator
    ) -> LossOutput:
        """Return the sums to minimise; see `agents.Agent.loss`."""
        return self._agent.loss(network, self.distribution, batch, self._config.agent, generator)

    def summarize(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Return figures to show from metrics summed over a global batch."""
        return self._agent.summarize(sums, count)
