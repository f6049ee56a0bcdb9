"""Observations of a gymnasium space, flattened to named arrays and checked against the space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env_wrappers.batch import Arrays
from env_wrappers.errors import EnvError
from env_wrappers.spaces import Keys, path_of, walk

# Box dtypes that change on the way; all others travel as declared. The networks compute in
# float32 at most, and unsigned integers wider than 8 bits are poorly supported by torch.
_TRAVEL_DTYPES = {
    "float64": "float32",
    "float16": "float32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}


@dataclass(frozen=True, eq=False)
class Leaf:
    """One leaf of an observation space.

    Attributes:
      path: name of the leaf, "obs" for a bare space, "a/b" in nested ones.
      keys: how to find it in an observation.
      kind: "box", "discrete" or "binary".
      shape: of one time step.
      declared: the space's own dtype.
      dtype: as it travels (float64 as float32, categories as int32, flags as uint8).
      low: lower bounds; of categories as declared, before they are shifted to start at 0.
      high: upper bounds, inclusive.
      nvec: categories per element, flattened; empty unless "discrete".
    """

    path: str
    keys: Keys
    kind: Literal["box", "discrete", "binary"]
    shape: tuple[int, ...]
    declared: np.dtype[Any]
    dtype: np.dtype[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    nvec: tuple[int, ...] = ()


class ObservationCodec:
    """Flattens observations of a space to leaves by path, and checks them.

    Attributes:
      leaves: all leaves, in wire order.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        """Raises EnvError if the space cannot travel."""
        self.leaves = [_leaf(keys, inner) for keys, inner in walk(space, "observation")]
        paths = [leaf.path for leaf in self.leaves]
        if not paths:
            raise EnvError(f"observation space {space} has no leaves")
        if len(set(paths)) < len(paths):
            raise EnvError(f"observation space has two leaves of one path: {', '.join(paths)}")

    def spec(self, stack: int = 1) -> dict[str, Any]:
        """JSON-able description by path; `stack` time steps are to be stacked in box leaves.

        Raises:
          EnvError: a stack is asked for, but no leaf is a Box.
        """
        if stack > 1 and all(leaf.kind != "box" for leaf in self.leaves):
            raise EnvError(f"frame_stack is {stack}, but no observation leaf is a Box")
        return {
            leaf.path: {
                "array": {"shape": list(leaf.shape), "dtype": leaf.dtype.name},
                "kind": leaf.kind,
                "nvec": list(leaf.nvec),
                "stack": stack if leaf.kind == "box" else 1,
            }
            for leaf in self.leaves
        }

    def new_arrays(self, num_envs: int) -> Arrays:
        """Zero leaves `[E, ...]`."""
        return {leaf.path: np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in self.leaves}

    def encode(self, observation: Any, num_envs: int, rows: Any = ...) -> Arrays:
        """Copy a batched observation, as a gymnasium vector environment gives it, to leaves.

        Args:
          observation: the batched structure.
          num_envs: E.
          rows: `<bool>[E]`, where it means something; the others are left zero.

        Raises:
          EnvError: shape, kind of number or category don't match the space.
        """
        arrays = self.new_arrays(num_envs)
        for leaf in self.leaves:
            _write(leaf, observation, arrays[leaf.path], (num_envs, *leaf.shape), rows)
        return arrays

    def write_row(self, arrays: Arrays, row: int, observation: Any) -> None:
        """Copy the observation of one environment into row `row` of `arrays`.

        Raises:
          EnvError: as `encode`.
        """
        for leaf in self.leaves:
            _write(leaf, observation, arrays[leaf.path][row : row + 1], leaf.shape)

    def check_bounds(self, arrays: Arrays) -> None:
        """Raise EnvError unless all numbers and flags lie in their space (NaN does not)."""
        for leaf in self.leaves:
            if leaf.kind == "discrete":
                continue  # checked on every write
            array = arrays[leaf.path]
            low, high = leaf.low, leaf.high
            if leaf.dtype.kind == "f":  # numbers and bounds were rounded to float32
                with np.errstate(over="ignore"):
                    low = low - 1e-5 * (1.0 + np.abs(low))
                    high = high + 1e-5 * (1.0 + np.abs(high))
            if not np.all((array >= low) & (array <= high)):
                raise EnvError(
                    f"observation leaf {leaf.path!r}: expected values from {leaf.low.min()} to "
                    f"{leaf.high.max()}, got {array.min()} to {array.max()}"
                )


def _leaf(keys: Keys, space: Any) -> Leaf:
    """The leaf for one space that `walk` yields."""
    path, declared = path_of(keys), np.dtype(space.dtype)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        shape = () if isinstance(space, spaces.Discrete) else space.nvec.shape
        nvec = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64)
        start = np.asarray(space.start, np.int64)
        counts = tuple(int(count) for count in nvec.ravel())
        dtype = np.dtype(np.int32)
        return Leaf(path, keys, "discrete", shape, declared, dtype, start, start + nvec - 1, counts)
    shape = tuple(space.shape)
    if isinstance(space, spaces.MultiBinary) or declared == np.bool_:
        zero, one = np.zeros(shape, np.uint8), np.ones(shape, np.uint8)
        return Leaf(path, keys, "binary", shape, declared, np.dtype(np.uint8), zero, one)
    dtype = np.dtype(_TRAVEL_DTYPES.get(declared.name, declared.name))
    low, high = _bounds(space.low, dtype), _bounds(space.high, dtype)
    return Leaf(path, keys, "box", shape, declared, dtype, low, high)


def _bounds(bounds: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`bounds` in `dtype`, at its limits where they don't fit."""
    if bounds.dtype == np.uint64:
        bounds = np.minimum(bounds, np.uint64(np.iinfo(np.int64).max))
    with np.errstate(over="ignore"):
        return bounds.astype(dtype)


def _write(
    leaf: Leaf, observation: Any, out: NDArray[Any], shape: tuple[int, ...], rows: Any = ...
) -> None:
    """Check the leaf's value in `observation`, whose shape must be `shape`, and copy `rows`."""
    value = observation
    try:
        for key in leaf.keys:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        raise EnvError(
            f"observation leaf {leaf.path!r}: missing in an observation of type "
            f"{type(observation).__name__}"
        ) from None
    array = np.asarray(value)
    if array.shape != shape:
        raise EnvError(f"observation leaf {leaf.path!r}: expected shape {shape}, got {array.shape}")
    if array.dtype != leaf.declared and not _castable(leaf, array.dtype):
        raise EnvError(
            f"observation leaf {leaf.path!r}: expected dtype {leaf.declared}, got {array.dtype}"
        )
    array = array[rows]
    if leaf.kind == "discrete":
        if not np.all((array >= leaf.low) & (array <= leaf.high)):
            raise EnvError(
                f"observation leaf {leaf.path!r}: expected categories from {leaf.low.min()} to "
                f"{leaf.high.max()}, got {array.min()} to {array.max()}"
            )
        array = array - leaf.low
    out[rows] = array


def _castable(leaf: Leaf, dtype: np.dtype[Any]) -> bool:
    """Whether values of `dtype` may stand for the leaf's declared dtype."""
    if leaf.kind == "box":
        return np.can_cast(dtype, leaf.declared, "same_kind")
    return dtype.kind in "iub"
