"""Parameters of the Ape-X DQN agent; no torch."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hpcrl.agents.q_learning import QLearningConfig
from hpcrl.config.types import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ApexConfig(QLearningConfig):
    """Q-learning from prioritized n-step transitions (Ape-X DQN, arXiv:1803.00933)."""

    name: Literal["apex"] = "apex"
    """The agent; `learner.batch_unrolls` counts transitions."""

    def items_per_unroll(self, unroll_steps: int) -> int:
        """Replay items of one unroll: a transition for each of its steps."""
        return unroll_steps
