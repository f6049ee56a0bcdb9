"""What crosses the wire, described as data: array leaves, action parts, the environment.

Built from the JSON-able description that `env_wrappers` gives (it imports nothing from
here), so ranks that need no emulator learn the spaces from a start-up broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

ENV_FAILURES = ("raised", "garbage", "hung", "died")
"""How isolated environments fail, in the order of their counts in a step message."""


@dataclass(frozen=True)
class ArraySpec:
    """One array without its leading axes: `shape` and numpy `dtype` name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one array of this spec."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ObservationLeaf:
    """One leaf of the observation.

    Attributes:
      array: shape and dtype of ONE time step as it travels (a single frame, not a stack).
      kind: "box" (numbers), "discrete" (one category each; `nvec` gives the counts) or
        "binary" (0/1 flags).
      nvec: categories per element for "discrete", flattened; empty otherwise.
      stack: number of consecutive steps that the network sees stacked in a new first
        axis, rebuilt by the receiver; 1 means no stacking.
      bits: shape of the flags of a "binary" leaf that travels and is stored as bits, in the
        order of `numpy.packbits`; `array` is then the vector of bytes. Empty: not packed.
    """

    array: ArraySpec
    kind: Literal["box", "discrete", "binary"] = "box"
    nvec: tuple[int, ...] = ()
    stack: int = 1
    bits: tuple[int, ...] = ()

    @property
    def seen(self) -> ArraySpec:
        """One time step as a network or a reader sees it, its flags one byte each."""
        return ArraySpec(self.bits, "uint8") if self.bits else self.array


def unpack_bits(packed: npt.NDArray[Any], bits: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return the flags `[..., *bits]` of bytes `[..., n]`; undoes `numpy.packbits`."""
    flags = np.unpackbits(packed, axis=-1, count=math.prod(bits))
    return flags.reshape(*packed.shape[:-1], *bits)


@dataclass(frozen=True)
class ActionPart:
    """One part of the action vector.

    Attributes:
      kind: "discrete" or "box".
      nvec: for "discrete", the categories of each component (MultiBinary is all 2s).
      low, high: for "box", the bounds of each component (may be infinite).
    """

    kind: Literal["discrete", "box"]
    nvec: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Components of this part in the flat action vector."""
        return len(self.nvec) if self.kind == "discrete" else len(self.low)


@dataclass(frozen=True)
class ActionSpec:
    """The flat action vector `[A]`: parts one after the other, in order.

    The dtype is int32 when every part is discrete, else float32 (categories are then
    exact small floats).
    """

    parts: tuple[ActionPart, ...]

    @property
    def size(self) -> int:
        """Components of the flat action vector."""
        return sum(part.size for part in self.parts)

    @property
    def dtype(self) -> str:
        """numpy dtype name of the action vector."""
        return "int32" if all(p.kind == "discrete" for p in self.parts) else "float32"

    @property
    def array(self) -> ArraySpec:
        """Array spec of one action vector."""
        return ArraySpec((self.size,), self.dtype)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ActionSpec:
        """Build the spec from the dict that `env_wrappers` gives."""
        parts = data["parts"]
        return ActionSpec(
            tuple(
                ActionPart(p["kind"], tuple(p["nvec"]), tuple(p["low"]), tuple(p["high"]))
                for p in parts
            )
        )


@dataclass(frozen=True)
class EnvSpec:
    """Everything that the other ranks need to know of the environment.

    Attributes:
      name: the environment's full name, such as "atari:Breakout".
      observation: leaves by path, in wire order.
      action: the flat action vector.
      frame_skip: emulator frames per agent step.
    """

    name: str
    observation: Mapping[str, ObservationLeaf]
    action: ActionSpec
    frame_skip: int = 1

    def unpacked(self) -> EnvSpec:
        """The same with every leaf as it is seen, none as bits."""
        leaves = {
            path: replace(leaf, array=leaf.seen, bits=()) for path, leaf in self.observation.items()
        }
        return replace(self, observation=leaves)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict; the inverse of `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EnvSpec:
        """Build the spec from the dict that `env_wrappers` or `to_json` gives."""
        leaves = {
            path: ObservationLeaf(
                array=ArraySpec(tuple(leaf["array"]["shape"]), leaf["array"]["dtype"]),
                kind=leaf["kind"],
                nvec=tuple(leaf["nvec"]),
                stack=leaf["stack"],
                bits=tuple(leaf["bits"]),
            )
            for path, leaf in data["observation"].items()
        }
        action = ActionSpec.from_json(data["action"])
        return EnvSpec(data["name"], leaves, action, int(data["frame_skip"]))
