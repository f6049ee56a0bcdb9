"""The memory that a batch of environments shares with the process that steps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env_wrappers.batch import StepBatch

_ALIGN_BYTES = 64
_FLAGS = ("terminated", "truncated", "valid", "restarted", "ended")


def _fields(spec: Mapping[str, Any], num_envs: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array, in order of place; both ends derive it from the spec."""
    parts = spec["action"]["parts"]
    size = sum(len(part["nvec"]) or len(part["low"]) for part in parts)
    discrete = all(part["kind"] == "discrete" for part in parts)
    fields: dict[str, tuple[tuple[int, ...], str]] = {
        "action": ((num_envs, size), "int32" if discrete else "float32"),
        "has_final": ((1,), "bool"),
        "reward": ((num_envs,), "float32"),
        "episode_return": ((num_envs,), "float32"),
        "episode_steps": ((num_envs,), "int32"),
    }
    fields |= {name: ((num_envs,), "bool") for name in _FLAGS}
    for prefix in ("obs", "final"):
        for path, leaf in spec["observation"].items():
            array = leaf["array"]
            fields[f"{prefix}:{path}"] = ((num_envs, *array["shape"]), array["dtype"])
    return fields


def memory_nbytes(spec: Mapping[str, Any], num_envs: int) -> int:
    """Bytes that `StepMemory` needs."""
    return sum(_padded(shape, dtype) for shape, dtype in _fields(spec, num_envs).values())


def _padded(shape: tuple[int, ...], dtype: str) -> int:
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


class StepMemory:
    """Actions one way, what the environments gave the other way.

    Args:
      buffer: at least `memory_nbytes` writable bytes.
      spec: of the batch.
      num_envs: E.

    Attributes:
      action: `<int32|float32>[E, A]`, a view.
    """

    def __init__(self, buffer: Any, spec: Mapping[str, Any], num_envs: int):
        self._views: dict[str, NDArray[Any]] = {}
        self._paths = tuple(spec["observation"])
        offset = 0
        for name, (shape, dtype) in _fields(spec, num_envs).items():
            self._views[name] = np.ndarray(shape, dtype, buffer, offset)
            offset += _padded(shape, dtype)
        self.action = self._views["action"]

    def write(self, step: StepBatch) -> None:
        """Copy a step in."""
        views = self._views
        for name in (*_FLAGS, "reward", "episode_return", "episode_steps"):
            views[name][:] = getattr(step, name)
        for path in self._paths:
            views[f"obs:{path}"][:] = step.observation[path]
        views["has_final"][0] = step.final_observation is not None
        if step.final_observation is not None:
            for path in self._paths:
                views[f"final:{path}"][:] = step.final_observation[path]

    def read(self) -> StepBatch:
        """Copy the step out."""
        views = self._views
        final = None
        if views["has_final"][0]:
            final = {path: views[f"final:{path}"].copy() for path in self._paths}
        return StepBatch(
            observation={path: views[f"obs:{path}"].copy() for path in self._paths},
            reward=views["reward"].copy(),
            terminated=views["terminated"].copy(),
            truncated=views["truncated"].copy(),
            valid=views["valid"].copy(),
            restarted=views["restarted"].copy(),
            final_observation=final,
            ended=views["ended"].copy(),
            episode_return=views["episode_return"].copy(),
            episode_steps=views["episode_steps"].copy(),
        )
