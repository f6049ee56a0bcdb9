"""An agent bound to an environment and a configuration: network, acting, loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hpcrl.agents import (
    REPLAY_AGENTS,
    ActOutput,
    EpochAgent,
    LossOutput,
    ReplayAgent,
    ReplayWindow,
    load_agent,
)
from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.config.root import Config
from hpcrl.nets.network import Network
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.exploration import Exploration
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

    def make_network(self, seed: int) -> Network:
        """Build the network with initial weights that depend on `seed` alone.

        Raises:
          ValueError: the agent can't learn in this environment or with this network.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._agent.make_network(
                self._env, self.distribution, self._config.network, self._config.agent
            )

    @property
    def behaviour(self) -> dict[str, ArraySpec]:
        """What acting records per row."""
        return self._agent.behaviour_spec()

    @property
    def window(self) -> ReplayWindow | None:
        """Which rows one replay item needs; None for an agent that learns without a replay.

        Raises:
          ValueError: the unroll is too short for it.
        """
        config = self._config
        if config.agent.name not in REPLAY_AGENTS:
            return None
        agent = cast("ReplayAgent", self._agent)
        return agent.window(config.agent, config.learner.unroll_steps)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the loss's metrics, of an agent whose workers compute gradients; else none."""
        return getattr(self._agent, "metrics", ())

    @property
    def target_update_steps(self) -> int:
        """Learner steps between copies to the target network; 0: there is none."""
        return getattr(self._config.agent, "target_update_steps", 0)

    @property
    def epochs(self) -> tuple[int, int, float] | None:
        """Epochs, minibatches and largest divergence of an agent that prepares its batches."""
        agent = self._config.agent
        if not isinstance(agent, PPOConfig):
            return None
        return agent.epochs, agent.minibatches, agent.max_kl

    @property
    def normalize_advantages(self) -> bool:
        """Whether advantages are normalized over the global batch."""
        return getattr(self._config.agent, "normalize_advantages", False)

    def prepare(self, batch: UnrollBatch) -> UnrollBatch:
        """Return what epochs work on; see `agents.EpochAgent.prepare`."""
        return cast("EpochAgent", self._agent).prepare(batch, self._config.agent)

    def exploration(self, env_ids: npt.NDArray[np.int64], num_envs: int) -> Exploration | None:
        """Return how some of the job's environments explore; see `agents.Agent.exploration`."""
        return self._agent.exploration(env_ids, num_envs, self._config.agent)

    def act(
        self,
        network: nn.Module,
        inputs: NetInputs,
        core_state: torch.Tensor,
        generator: torch.Generator,
        greedy: bool = False,
        epsilon: torch.Tensor | None = None,
    ) -> ActOutput:
        """Choose actions for one step of N rows; see `agents.Agent.act`."""
        return self._agent.act(
            network, self.distribution, inputs, core_state, generator, greedy, epsilon
        )

    def initial_priorities(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return priorities of new replay items; see `agents.ReplayAgent.initial_priorities`."""
        return cast("ReplayAgent", self._agent).initial_priorities(rows, self._config.agent)

    def loss(
        self,
        network: nn.Module,
        batch: UnrollBatch,
        generator: torch.Generator,
        target: nn.Module | None = None,
    ) -> LossOutput:
        """Return the sums to minimise; see `agents.Agent.loss`."""
        return self._agent.loss(
            network, self.distribution, batch, self._config.agent, generator, target
        )

    def summarize(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Return figures to show from metrics summed over a global batch."""
        return self._agent.summarize(sums, count)
