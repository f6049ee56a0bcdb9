"""Algorithms: each is a config, an acting function and a loss, built from `hpcrl.ops`.

Importing this package, or an agent's `config`, imports no torch: actors read configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from hpcrl.specs import ArraySpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hpcrl.ops.distributions import ActionDistribution
    from hpcrl.types import NetInputs, UnrollBatch

AGENTS = ("vtrace",)
"""Names of the agents."""


@dataclass(frozen=True)
class ActOutput:
    """What acting gives for N rows.

    Attributes:
      action: `<int32 or float32>[N, A]`.
      behaviour: arrays `[N, ...]` of the agent's `behaviour_spec`, recorded for its loss.
      core_state: `<float32>[N, S]`, recurrent state after these rows.
    """

    action: Tensor
    behaviour: dict[str, Tensor]
    core_state: Tensor


@dataclass(frozen=True)
class LossOutput:
    """Sums over the real transitions of a batch, so that shares of a global batch add up.

    Attributes:
      loss_sum: `<float32>[]`, with gradient; divided by the GLOBAL count after the reduction
        its gradient is that of the mean over the global batch.
      count: `<float32>[]`, number of real transitions.
      metrics: `<float32>[]` each, sums without gradient.
    """

    loss_sum: Tensor
    count: Tensor
    metrics: dict[str, Tensor]


class Agent(Protocol):
    """What the roles need of an algorithm."""

    def behaviour_spec(self) -> dict[str, ArraySpec]:
        """Return the arrays that acting records per row, in wire order."""

    def act(
        self,
        net: nn.Module,
        distribution: ActionDistribution,
        inputs: NetInputs,
        core_state: Tensor,
        generator: torch.Generator | None,
        greedy: bool,
    ) -> ActOutput:
        """Choose actions for one step of N rows."""

    def loss(
        self,
        net: nn.Module,
        distribution: ActionDistribution,
        batch: UnrollBatch,
        config: Any,
        generator: torch.Generator | None,
    ) -> LossOutput:
        """Return what to minimise over a batch of unrolls."""

    def summarize(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Return the figures to show, from metrics summed over a global batch."""


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
