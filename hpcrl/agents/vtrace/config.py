"""Parameters of the V-trace agent; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from hpcrl.config.types import STRICT, NonNegativeFloat, PositiveFloat

_Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VTraceConfig:
    """Off-policy corrected actor-critic (IMPALA, arXiv:1802.01561)."""

    name: Literal["vtrace"] = "vtrace"
    """The agent."""
    discount: _Fraction = 0.99
    """Discount factor per agent step (gamma)."""
    lambda_: _Fraction = 1.0
    """Multiplies the trace coefficients: 1 is V-trace as published, smaller values trade
    variance for bias."""
    rho_bar: PositiveFloat = 1.0
    """Largest importance weight of a temporal difference; decides which policy's value is
    learned."""
    c_bar: PositiveFloat = 1.0
    """Largest trace coefficient, at most rho_bar; decides how fast values spread."""
    pg_rho_bar: PositiveFloat = 1.0
    """Largest importance weight of the policy gradient."""
    value_cost: NonNegativeFloat = 0.5
    """Weight of the value loss, half the squared error per transition."""
    entropy_cost: NonNegativeFloat = 0.01
    """Weight of the entropy bonus per transition, in nats."""
    kl_cost: NonNegativeFloat = 0.0
    """Weight of the divergence of the policy from the one that acted, in nats; 0: off."""
    reward_clip: NonNegativeFloat = 0.0
    """Largest magnitude of a reward in the loss; recorded returns are never clipped. 0: off."""

    @model_validator(mode="after")
    def _check_bounds(self) -> VTraceConfig:
        if self.c_bar > self.rho_bar:
            raise ValueError(
                f"c_bar is {self.c_bar}, above rho_bar {self.rho_bar}: V-trace is a contraction "
                "only for c_bar <= rho_bar; lower c_bar or raise rho_bar"
            )
        return self
