"""What R2D2 and Ape-X share: parameters of Q-learning from replay; no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from hpcrl.config.types import STRICT, NonNegative, NonNegativeFloat, Positive

Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QLearningConfig:
    """Double Q-learning with n-step targets, dueling heads and a target network."""

    # Not docstrings: pydantic reads those in the class of the fields alone, not in those
    # that inherit them.
    discount: Fraction = Field(
        default=0.997,
        description="Discount factor per agent step (gamma).",
    )
    num_steps: Positive = Field(
        default=5,
        description="n: rewards in a target before it bootstraps.",
    )
    target_update_steps: Positive = Field(
        default=2500,
        description="Learner steps between copies of the network to the target network.",
    )
    head_size: Positive = Field(
        default=512,
        description="Units of the hidden layer of each stream of the dueling head.",
    )
    rescale: bool = Field(
        default=True,
        description=(
            "Learn h(Q), h(x) = sign(x) (sqrt(|x| + 1) - 1) + rescale_epsilon x, instead of Q."
        ),
    )
    rescale_epsilon: NonNegativeFloat = Field(
        default=1e-3,
        description="Linear part of h.",
    )
    reward_clip: NonNegativeFloat = Field(
        default=0.0,
        description=(
            "Largest magnitude of a reward in the loss; recorded returns are never clipped. 0: off."
        ),
    )
    evaluation_envs: NonNegative = Field(
        default=0,
        description=(
            "Environments, the last ids of the job, that only measure: they act with "
            "`evaluation_epsilon`, nothing of theirs is stored, and the returns shown and "
            "stopped on are theirs. The others explore with the ladder 0.4^(1 + 7 i / (N - "
            "1))."
        ),
    )
    evaluation_epsilon: Fraction = Field(
        default=1e-3,
        description="Probability of an action at random in evaluation environments.",
    )

    @property
    def h_epsilon(self) -> float | None:
        """`rescale_epsilon`, None for no rescaling."""
        return self.rescale_epsilon if self.rescale else None
