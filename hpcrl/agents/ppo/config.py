"""Parameters of the PPO agent; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hpcrl.config.types import STRICT, NonNegativeFloat, Positive, PositiveFloat

_Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOConfig:
    """Several epochs of clipped policy gradient on every batch (arXiv:1707.06347)."""

    name: Literal["ppo"] = "ppo"
    """The agent."""
    discount: _Fraction = 0.99
    """Discount factor per agent step (gamma)."""
    lambda_: _Fraction = 0.95
    """Of the generalized advantage estimate; the value's target is the lambda-return."""
    epochs: Positive = 4
    """Passes over each batch."""
    minibatches: Positive = 4
    """Optimizer steps of a pass; each takes an equal share of every learner's batch."""
    minibatch_over: Literal["transitions", "unrolls"] = "transitions"
    """What is shuffled into minibatches: single transitions, or whole unrolls, which keep the
    recurrent state going."""
    clip_ratio: PositiveFloat = 0.2
    """The gradient stops where pi / mu is beyond 1 +- this (epsilon)."""
    value_clip: NonNegativeFloat = 0.0
    """Largest change of a value in one learner step that its loss rewards; 0: not limited."""
    value_cost: NonNegativeFloat = 0.5
    """Weight of the value loss, half the squared error per transition."""
    entropy_cost: NonNegativeFloat = 0.01
    """Weight of the entropy bonus per transition, in nats."""
    normalize_advantages: bool = True
    """Give advantages mean 0 and variance 1 over the global batch."""
    max_kl: NonNegativeFloat = 0.0
    """After an epoch whose mean divergence from the acting policy was larger, in nats, the rest
    is left out, on all learners alike; 0: never."""
    normalize_observations: bool = False
    """Give observations of real numbers mean 0 and variance 1 over all that was seen so far; the
    statistics are part of the weights."""
    observation_clip: PositiveFloat = 10.0
    """Largest magnitude of a normalized observation."""
    reward_clip: NonNegativeFloat = 0.0
    """Largest magnitude of a reward in the loss; recorded returns are never clipped. 0: off."""
