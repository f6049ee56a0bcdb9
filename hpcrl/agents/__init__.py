"""Algorithms: each is a config, an acting function and a loss, built from `hpcrl.ops`.

Importing this package, or an agent's `config`, imports no torch: actors read configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpcrl.specs import ArraySpec, EnvSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor, nn

    from hpcrl.config.sections import NetworkConfig
    from hpcrl.nets.network import Network
    from hpcrl.ops.distributions import ActionDistribution
    from hpcrl.ops.exploration import Exploration
    from hpcrl.types import NetInputs, UnrollBatch

AGENTS = ("vtrace", "ppo", "a3c", "r2d2", "apex")
"""Names of the agents."""

REPLAY_AGENTS = ("r2d2", "apex")
"""Those that learn from a replay."""


@dataclass(frozen=True)
class ActOutput:
    """What acting gives for N rows.

    Attributes:
      action: `<int32 or float32>[N, A]`.
      behaviour: arrays `[N, ...]` of the agent's `behaviour_spec`, recorded for its loss or
        its initial priorities.
      core_state: `<float32>[N, S]`, recurrent state after these rows.
    """

    action: Tensor
    behaviour: dict[str, Tensor]
    core_state: Tensor


@dataclass(frozen=True)
class LossOutput:
    """Sums over a batch, so that shares of a global batch add up.

    Attributes:
      loss_sum: `<float32>[]`, with gradient; divided by the GLOBAL count after the reduction
        its gradient is that of the mean over the global batch.
      count: `<float32>[]`, what the mean is over: real transitions, or sampled replay items.
      metrics: `<float32>[]` each, sums without gradient.
      priorities: `<float32>[B]`, of the batch's replay items; None without a replay.
    """

    loss_sum: Tensor
    count: Tensor
    metrics: dict[str, Tensor]
    priorities: Tensor | None = None


class ReplayWindow(NamedTuple):
    """Which rows one replay item needs; see `replay.layout.ReplayLayout`.

    Attributes:
      burn_in_steps: rows before the loss rows.
      loss_steps: L, loss rows; one more row follows to bootstrap from.
      items_per_unroll: I.
      cross_episodes: whether an unroll goes on with the next episode; see `unroll.UnrollStore`.
    """

    burn_in_steps: int
    loss_steps: int
    items_per_unroll: int
    cross_episodes: bool


class Agent(Protocol):
    """What the roles need of an algorithm."""

    def behaviour_spec(self) -> dict[str, ArraySpec]:
        """Return the arrays that acting records per row, in wire order."""

    def make_network(
        self, env: EnvSpec, distribution: ActionDistribution, network: NetworkConfig, config: Any
    ) -> Network:
        """Build the network with torch's default random stream.

        Raises:
          ValueError: the agent can't learn in this environment or with this network.
        """

    def exploration(
        self, env_ids: npt.NDArray[np.int64], num_envs: int, config: Any
    ) -> Exploration | None:
        """Return how each of `env_ids` explores, None where the policy itself does."""

    def act(
        self,
        net: nn.Module,
        distribution: ActionDistribution,
        inputs: NetInputs,
        core_state: Tensor,
        generator: torch.Generator | None,
        greedy: bool,
        epsilon: Tensor | None,
    ) -> ActOutput:
        """Choose actions for one step of N rows; `epsilon` is `<float32>[N]`."""

    def loss(
        self,
        net: nn.Module,
        distribution: ActionDistribution,
        batch: UnrollBatch,
        config: Any,
        generator: torch.Generator | None,
        target: nn.Module | None,
    ) -> LossOutput:
        """Return what to minimise over a batch; `target` is the target network, if any."""

    def summarize(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Return the figures to show, from metrics summed over a global batch."""


class GradientAgent(Agent, Protocol):
    """An agent whose workers compute gradients.

    Attributes:
      metrics: names of the metrics of its loss, which travel with each gradient.
    """

    metrics: tuple[str, ...]


class EpochAgent(Agent, Protocol):
    """An agent that takes several optimizer steps on every batch.

    Its config has `epochs`, `minibatches`, `max_kl` and `normalize_advantages`.
    """

    def prepare(self, batch: UnrollBatch, config: Any) -> UnrollBatch:
        """Return the rows of a batch that act, with what every epoch needs of them.

        `behaviour["advantage"]` is `<float32>[T, B]`; the loss divides these rows' sums.
        """


class ReplayAgent(Agent, Protocol):
    """An agent that learns from replay: it has a target network and gives priorities."""

    def window(self, config: Any, unroll_steps: int) -> ReplayWindow:
        """Return which rows one replay item needs.

        Raises:
          ValueError: the unroll is too short for it.
        """

    def initial_priorities(self, rows: Mapping[str, Tensor], config: Any) -> Tensor:
        """Return the priorities of a complete unroll's items from what acting recorded.

        Args:
          rows: reward, terminated, final and the behaviour arrays, `[H+T+1, n]`; the first
            H = max(0, L - T/I) rows are of the unrolls before.
          config: the agent's parameters.

        Returns:
          `<float32>[n, I]`, below 0 for an item that must never be sampled.
        """


def load_agent(name: str) -> Agent:
    """Import an agent, and torch with it.

    Args:
      name: one of `AGENTS`.

    Returns:
      Its functions.

    Raises:
      ValueError: there is no such agent.
    """
    if name not in AGENTS:
        raise ValueError(f"there is no agent {name!r}; agents are {', '.join(AGENTS)}")
    return import_module(f"hpcrl.agents.{name}.agent").AGENT
