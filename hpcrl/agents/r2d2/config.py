"""Parameters of the R2D2 agent; no torch."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hpcrl.agents.q_learning import Fraction, QLearningConfig
from hpcrl.config.types import STRICT, NonNegative


@dataclass(frozen=True, kw_only=True, config=STRICT)
class R2D2Config(QLearningConfig):
    """Recurrent Q-learning from replayed sequences (R2D2, Kapturowski et al. 2019)."""

    name: Literal["r2d2"] = "r2d2"
    """The agent."""
    burn_in_steps: NonNegative = 40
    """Rows before each sequence that only bring the recurrent state up to date; less than
    `learner.unroll_steps`."""
    priority_eta: Fraction = 0.9
    """A sequence's priority is eta times its largest error plus (1 - eta) times the mean."""
    cross_episodes: bool = True
    """Whether a sequence goes on with the next episode, as in SEED RL (the recurrent state is
    reset inside); false: it ends with its episode, as in the R2D2 paper, and is filled up with
    rows that are not trained on."""

    def items_per_unroll(self, unroll_steps: int) -> int:
        """Replay items of one unroll: it is one sequence."""
        return 1
