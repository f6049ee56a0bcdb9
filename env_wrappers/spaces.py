"""Walks a gymnasium space: which ones can travel as arrays, and the names of their leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from env_wrappers.errors import EnvError

Keys = tuple[Any, ...]
"""Dict keys and tuple indices that lead to a leaf of a nested space."""


def walk(space: spaces.Space[Any], what: str, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, space) of each leaf space, in order.

    Raises:
      EnvError: a space that has no fixed array form; the message names it and its place.
    """
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from walk(inner, what, (*keys, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from walk(inner, what, (*keys, index))
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield keys, space
    else:
        place = f" at {path_of(keys)!r}" if keys else ""
        raise EnvError(
            f"{what} space{place} is a {type(space).__name__}, which has no fixed array form; "
            "supported are Box, Discrete, MultiDiscrete, MultiBinary and Dict and Tuple of these"
        )


def path_of(keys: Keys) -> str:
    """The name of a leaf: "obs" for a bare space, "a/b" in nested ones."""
    return "/".join(str(key) for key in keys) or "obs"


def binary_planes(shape: tuple[int, ...]) -> spaces.Box:
    """The space of flags `<bool>[*shape]`."""
    dtype: Any = np.bool_
    return spaces.Box(0, 1, shape, dtype)
