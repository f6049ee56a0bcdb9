"""Flat action vectors, as policies give them, decoded to the actions of a gymnasium space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env_wrappers.errors import ActionError, EnvError
from env_wrappers.spaces import walk


class ActionCodec:
    """Turns flat action vectors into actions of a space.

    Attributes:
      size: A, components of the vector.
      dtype: int32 when all components are categories, else float32.
    """

    def __init__(self, space: spaces.Space[Any], num_envs: int) -> None:
        """Raises EnvError if the space cannot travel."""
        self._space = space
        self._num_envs = num_envs
        self._leaves = [inner for _, inner in walk(space, "action")]
        self._parts = [_action_part(inner) for inner in self._leaves]
        sizes = [len(part["nvec"]) or len(part["low"]) for part in self._parts]
        self.size = sum(sizes)
        if self.size == 0:
            raise EnvError(f"action space {space} has no components")
        ends = np.cumsum(sizes).tolist()
        self._slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        discrete = all(part["kind"] == "discrete" for part in self._parts)
        self.dtype: np.dtype[Any] = np.dtype(np.int32 if discrete else np.float32)
        # Categories per component; 0 for a box component, which has none.
        counts = [part["nvec"] or [0] * len(part["low"]) for part in self._parts]
        self._counts = np.concatenate(counts).astype(self.dtype)
        self._all_discrete = discrete

    def spec(self) -> dict[str, Any]:
        """JSON-able description of the parts of the vector."""
        return {"parts": self._parts}

    def decode(self, actions: NDArray[Any]) -> Any:
        """Decode `[E, A]` to the batched structure that a vector environment takes.

        Box values are clipped to their bounds; categories start at the space's `start`.

        Raises:
          ActionError: wrong shape, NaN, or a category that doesn't exist.
        """
        return _rebuild(self._space, iter(self._decode_leaves(actions)))

    def decode_rows(self, actions: NDArray[Any]) -> list[Any]:
        """Decode `[E, A]` to E actions, one for each single environment; see `decode`."""
        arrays = self._decode_leaves(actions)
        rows = [_split(space, array) for space, array in zip(self._leaves, arrays, strict=True)]
        if self._leaves[0] is self._space:
            return rows[0]
        return [_rebuild(self._space, iter(row)) for row in zip(*rows, strict=True)]

    def _decode_leaves(self, actions: NDArray[Any]) -> list[NDArray[Any]]:
        self._check(actions)
        return [
            _decode_leaf(space, actions[:, part])
            for space, part in zip(self._leaves, self._slices, strict=True)
        ]

    def _check(self, actions: NDArray[Any]) -> None:
        expected = (self._num_envs, self.size)
        if actions.shape != expected:
            raise ActionError(f"actions: expected shape {expected}, got {actions.shape}")
        fits = (actions >= 0) & (actions < self._counts)
        if not self._all_discrete:
            fits = np.where(self._counts == 0, ~np.isnan(actions), fits)
        if not fits.all():
            row, column = np.argwhere(~fits)[0].tolist()
            count = int(self._counts[column])
            want = f"a category from 0 to {count - 1}" if count else "a number"
            raise ActionError(
                f"action of environment {row}, component {column}: expected {want}, "
                f"got {actions[row, column]}"
            )


def _action_part(space: Any) -> dict[str, Any]:
    """The JSON-able description of one part of the action vector."""
    if isinstance(space, spaces.Box):
        low = space.low.astype(np.float64).ravel().tolist()
        high = space.high.astype(np.float64).ravel().tolist()
        return {"kind": "box", "nvec": [], "low": low, "high": high}
    if isinstance(space, spaces.Discrete):
        nvec = [int(space.n)]
    elif isinstance(space, spaces.MultiDiscrete):
        nvec = space.nvec.ravel().tolist()
    else:
        nvec = [2] * int(np.prod(space.shape))
    return {"kind": "discrete", "nvec": nvec, "low": [], "high": []}


def _decode_leaf(space: Any, values: NDArray[Any]) -> NDArray[Any]:
    """Components `[E, n]` as the batched action of one leaf space."""
    shaped = values.reshape(len(values), *space.shape)
    if isinstance(space, spaces.Box):
        if space.dtype.kind == "f":
            return np.clip(shaped.astype(space.dtype), space.low, space.high)
        rounded = np.rint(np.asarray(shaped, np.float64))
        return np.clip(rounded, space.low, space.high).astype(space.dtype)
    categories = shaped.astype(space.dtype)
    return categories if isinstance(space, spaces.MultiBinary) else categories + space.start


def _split(space: Any, array: NDArray[Any]) -> list[Any]:
    """The rows of `[E, ...]`: ints for Discrete, arrays (0-dimensional, too) for all others."""
    if isinstance(space, spaces.Discrete):
        return array.tolist()
    return [array[row, ...] for row in range(len(array))]


def _rebuild(space: spaces.Space[Any], leaves: Iterator[Any]) -> Any:
    """The nested action whose leaves, in order, are `leaves`."""
    if isinstance(space, spaces.Dict):
        return {key: _rebuild(inner, leaves) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_rebuild(inner, leaves) for inner in space.spaces)
    return next(leaves)
