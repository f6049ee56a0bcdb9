"""Vocabulary of the configuration dataclasses: strictness and bounded numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    allow_inf_nan=False,
    coerce_numbers_to_str=True,
    ser_json_inf_nan="constants",
)
"""Unknown keys are refused; the string under a field is its documentation."""


def _reject_bool(value: Any) -> Any:
    # YAML reads `yes` and `on` as true, which would silently become 1.
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return value


Number = BeforeValidator(_reject_bool)
"""Refuses true and false where a number is wanted."""

Positive = Annotated[int, Field(gt=0), Number]
NonNegative = Annotated[int, Field(ge=0), Number]
PositiveFloat = Annotated[float, Field(gt=0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0), Number]
