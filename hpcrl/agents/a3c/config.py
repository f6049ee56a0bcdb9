"""Parameters of the A3C agent; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hpcrl.config.types import STRICT, NonNegative, NonNegativeFloat

_Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class A3CConfig:
    """Advantage actor-critic on n-step returns, by asynchronous gradients (arXiv:1602.01783)."""

    name: Literal["a3c"] = "a3c"
    """The agent."""
    discount: _Fraction = 0.99
    """Discount factor per agent step (gamma)."""
    n_steps: NonNegative = 0
    """Rewards of a return before it bootstraps; 0: all that are left in the unroll, as
    published."""
    value_cost: NonNegativeFloat = 0.5
    """Weight of the value loss, half the squared error per transition."""
    entropy_cost: NonNegativeFloat = 0.01
    """Weight of the entropy bonus per transition, in nats."""
    reward_clip: NonNegativeFloat = 0.0
    """Largest magnitude of a reward in the loss; recorded returns are never clipped. 0: off."""
