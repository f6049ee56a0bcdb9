"""Observations of a gymnasium space, flattened to named arrays and checked against the space."""

from __future__ import annotations

from collections.abc import Callable
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
      shape: of one time step; one with `packed_bytes` travels as a vector of these.
      declared: the space's own dtype.
      dtype: as it travels (float64 as float32, categories as int32, flags as uint8).
      low: lower bounds; of categories as declared, before they are shifted to start at 0.
      high: upper bounds, inclusive.
      nvec: categories per element, flattened; empty unless "discrete".
      packed_bytes: of more than eight flags, which travel as bits in the order of
        `numpy.packbits`; 0: not packed.
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
    packed_bytes: int = 0

    @property
    def travel_shape(self) -> tuple[int, ...]:
        """Of one time step as it travels."""
        return (self.packed_bytes,) if self.packed_bytes else self.shape


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
        # Of the leaves that `check_bounds` looks at; the others are checked on every write.
        self._limits = [
            (leaf, *_limits(leaf))
            for leaf in self.leaves
            if leaf.kind != "discrete" and not leaf.packed_bytes
        ]

    def spec(self, stack: int = 1) -> dict[str, Any]:
        """JSON-able description by path; `stack` time steps of all but categories are stacked.

        Raises:
          EnvError: a stack is asked for, but all leaves are categories.
        """
        if stack > 1 and all(leaf.kind == "discrete" for leaf in self.leaves):
            raise EnvError(
                f"frame_stack is {stack}, but all observation leaves are categories, which "
                "can't be stacked"
            )
        return {
            leaf.path: {
                "array": {"shape": list(leaf.travel_shape), "dtype": leaf.dtype.name},
                "kind": leaf.kind,
                "nvec": list(leaf.nvec),
                "stack": 1 if leaf.kind == "discrete" else stack,
                "bits": list(leaf.shape) if leaf.packed_bytes else [],
            }
            for leaf in self.leaves
        }

    def new_arrays(self, num_envs: int) -> Arrays:
        """Zero leaves `[E, ...]`."""
        return {
            leaf.path: np.zeros((num_envs, *leaf.travel_shape), leaf.dtype) for leaf in self.leaves
        }

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

    def new_raw(self, num_envs: int) -> list[NDArray[Any]]:
        """Arrays `[E, *shape]` of each leaf's declared dtype, for `writer` to fill."""
        return [np.empty((num_envs, *leaf.shape), leaf.declared) for leaf in self.leaves]

    def writer(self, raw: list[NDArray[Any]]) -> Callable[[int, Any], None]:
        """What copies the observation of one environment, as it is, into a row of `raw`.

        It is called as `write(row, observation)` for every environment at every step, and raises
        EnvError if shape or kind of number don't match the space.
        """
        writers = [_leaf_writer(leaf, array) for leaf, array in zip(self.leaves, raw, strict=True)]
        if not self.leaves[0].keys:
            return writers[0]

        def write(row: int, observation: Any) -> None:
            for leaf, write_leaf in zip(self.leaves, writers, strict=True):
                write_leaf(row, _find(leaf, observation))

        return write

    def travelling(self, raw: list[NDArray[Any]]) -> Arrays:
        """The leaves `[E, ...]` of all rows of `raw`, which they may share, encoded at once.

        Raises:
          EnvError: a category or flag that the space doesn't have.
        """
        return {
            leaf.path: _as_travelling(leaf, array).astype(leaf.dtype, copy=False)
            for leaf, array in zip(self.leaves, raw, strict=True)
        }

    def write_row(self, arrays: Arrays, row: int, observation: Any) -> None:
        """Copy the observation of one environment into row `row` of `arrays`.

        Raises:
          EnvError: as `encode`.
        """
        for leaf in self.leaves:
            _write(leaf, observation, arrays[leaf.path][row : row + 1], leaf.shape)

    def check_bounds(self, arrays: Arrays) -> None:
        """Raise EnvError unless all numbers and flags lie in their space (NaN does not)."""
        for leaf, low, high in self._limits:
            array = arrays[leaf.path]
            if not ((array >= low) & (array <= high)).all():
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
        packed_bytes = -(-zero.size // 8) if zero.size > 8 else 0
        return Leaf(
            path,
            keys,
            "binary",
            shape,
            declared,
            np.dtype(np.uint8),
            zero,
            one,
            packed_bytes=packed_bytes,
        )
    dtype = np.dtype(_TRAVEL_DTYPES.get(declared.name, declared.name))
    low, high = _bounds(space.low, dtype), _bounds(space.high, dtype)
    return Leaf(path, keys, "box", shape, declared, dtype, low, high)


def _limits(leaf: Leaf) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bounds, a little wider for numbers that were rounded to float32, as the bounds were."""
    if leaf.dtype.kind != "f":
        return leaf.low, leaf.high
    with np.errstate(over="ignore"):
        low = leaf.low - 1e-5 * (1.0 + np.abs(leaf.low))
        high = leaf.high + 1e-5 * (1.0 + np.abs(leaf.high))
    return low, high


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
    array = _checked(leaf, _find(leaf, observation), shape)
    out[rows] = _as_travelling(leaf, array[rows])


def _leaf_writer(leaf: Leaf, array: NDArray[Any]) -> Callable[[int, Any], None]:
    """What copies a leaf's value, checked, into a row of `array` `[E, *shape]`."""
    shape, declared = leaf.shape, leaf.declared

    def write(row: int, value: Any) -> None:
        try:  # numpy's own dtypes are one object each; any other goes the longer way
            fits = value.dtype is declared and value.shape == shape
        except AttributeError:
            fits = False
        if not fits:
            value = _checked(leaf, value, shape)
        array[row] = value

    return write


def _find(leaf: Leaf, observation: Any) -> Any:
    """The leaf's value in a nested observation."""
    value = observation
    try:
        for key in leaf.keys:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        raise EnvError(
            f"observation leaf {leaf.path!r}: missing in an observation of type "
            f"{type(observation).__name__}"
        ) from None
    return value


def _checked(leaf: Leaf, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """`value` as an array of `shape` and of a dtype that may stand for the declared one."""
    array = np.asarray(value)
    if array.shape != shape:
        raise EnvError(f"observation leaf {leaf.path!r}: expected shape {shape}, got {array.shape}")
    if array.dtype != leaf.declared and not _castable(leaf, array.dtype):
        raise EnvError(
            f"observation leaf {leaf.path!r}: expected dtype {leaf.declared}, got {array.dtype}"
        )
    return array


def _as_travelling(leaf: Leaf, array: NDArray[Any]) -> NDArray[Any]:
    """Values of any leading axes in their form on the way: categories from 0, flags as bits."""
    if leaf.kind == "discrete":
        if not np.all((array >= leaf.low) & (array <= leaf.high)):
            raise EnvError(
                f"observation leaf {leaf.path!r}: expected categories from {leaf.low.min()} to "
                f"{leaf.high.max()}, got {array.min()} to {array.max()}"
            )
        return array - leaf.low
    return _packed(leaf, array) if leaf.packed_bytes else array


def _packed(leaf: Leaf, array: NDArray[Any]) -> NDArray[np.uint8]:
    """Flags `[..., *shape]` as bits `[..., packed_bytes]`."""
    if array.dtype != np.bool_ and np.any((array < 0) | (array > 1)):
        raise EnvError(
            f"observation leaf {leaf.path!r}: expected flags of 0 and 1, got {array.min()} to "
            f"{array.max()}"
        )
    leading = array.shape[: array.ndim - len(leaf.shape)]
    return np.packbits(array.reshape(*leading, -1).astype(np.bool_, copy=False), axis=-1)


def _castable(leaf: Leaf, dtype: np.dtype[Any]) -> bool:
    """Whether values of `dtype` may stand for the leaf's declared dtype."""
    if leaf.kind == "box":
        return np.can_cast(dtype, leaf.declared, "same_kind")
    return dtype.kind in "iub"
