"""Options of an environment family: defaults, unknown keys, types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from env_wrappers.errors import EnvError, suggestion


def resolve_options(
    owner: str, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Overlay `defaults` with `given`.

    A value must have the type of its default; an int does for a float, a list for a tuple.

    Args:
      owner: whose options these are, for the message, such as "atari:Breakout".
      given: what the user set.
      defaults: every known option with its default.

    Raises:
      EnvError: an unknown key (with the closest known ones) or a value of the wrong type.
    """
    resolved = dict(defaults)
    for key, value in given.items():
        if key not in defaults:
            hint = suggestion(key, defaults) or f"; known options: {', '.join(sorted(defaults))}"
            raise EnvError(f"{owner} has no option {key!r}{hint}")
        resolved[key] = _as_type_of(defaults[key], value, f"{owner}: option {key}")
    return resolved


def check_range(
    owner: str, options: Mapping[str, Any], key: str, low: float, high: float | None = None
) -> None:
    """Raise EnvError unless `low <= options[key] <= high` (`high` None: no upper bound)."""
    value = options[key]
    if not (value >= low and (high is None or value <= high)):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise EnvError(f"{owner}: option {key} must be {bound}, got {value}")


def check_choice(
    owner: str, options: Mapping[str, Any], key: str, choices: tuple[str, ...]
) -> None:
    """Raise EnvError unless `options[key]` is one of `choices`."""
    value = options[key]
    if value not in choices:
        raise EnvError(
            f"{owner}: option {key} must be one of {', '.join(choices)}, got {value!r}"
            f"{suggestion(str(value), choices)}"
        )


def _as_type_of(default: Any, value: Any, where: str) -> Any:
    """`value` in the type of `default`, or EnvError."""
    if isinstance(default, bool) or isinstance(value, bool):
        accepted = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float):
        accepted = isinstance(value, (int, float))
        value = float(value) if accepted else value
    elif isinstance(default, tuple):
        accepted = isinstance(value, (list, tuple))
        value = tuple(value) if accepted else value
    elif isinstance(default, Mapping):
        accepted = isinstance(value, Mapping)
    else:
        accepted = isinstance(value, type(default))
    if not accepted:
        raise EnvError(f"{where} must be of type {type(default).__name__}, got {value!r}")
    return value
