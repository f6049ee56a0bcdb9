"""Received unrolls, or sampled ones → one time-major batch with stacks rebuilt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hpcrl.node.staging import Staging
from hpcrl.ops.frame_stack import stack_frames
from hpcrl.replay.records import ReplaySample
from hpcrl.specs import ArraySpec, EnvSpec
from hpcrl.types import UnrollBatch

Views = Mapping[str, npt.NDArray[np.generic]]

_ROWS = (
    "reward",
    "terminated",
    "start",
    "final",
    "previous_action",
    "action",
    "policy_version",
)


def _time_major(view: npt.NDArray[np.generic], slots: npt.NDArray[np.intp]) -> torch.Tensor:
    """Copy `[slots, T+1, ...]` to a contiguous tensor `[T+1, B, ...]`."""
    batch = np.empty((view.shape[1], len(slots), *view.shape[2:]), view.dtype)
    for column, slot in enumerate(slots):
        batch[:, column] = view[slot]
    return torch.from_numpy(batch)


def _stacked(
    frames: npt.NDArray[np.generic],
    prefix: npt.NDArray[np.generic],
    start: torch.Tensor,
    slots: npt.NDArray[np.intp],
) -> torch.Tensor:
    batch = _time_major(frames, slots).numpy()
    older = np.moveaxis(prefix[slots], 0, 1)
    stacks: npt.NDArray[np.generic] = stack_frames(batch, older, start.numpy())
    return torch.from_numpy(stacks)


def assemble(
    views: Views,
    slots: npt.NDArray[np.intp],
    env: EnvSpec,
    behaviour: Mapping[str, ArraySpec],
) -> UnrollBatch:
    """Copy the unrolls of `slots` into one batch in host memory.

    Args:
      views: of the receive slots, by field of `wire.unroll_layout`.
      slots: `<intp>[B]`.
      env: the environment's spec.
      behaviour: names of the recorded behaviour arrays.
    """
    rows = {name: _time_major(views[name], slots) for name in _ROWS}
    observation = {}
    for path, leaf in env.observation.items():
        frames = views[f"obs:{path}"]
        if leaf.stack > 1:
            prefix = views[f"prefix:{path}"]
            observation[path] = _stacked(frames, prefix, rows["start"], slots)
        else:
            observation[path] = _time_major(frames, slots)
    return UnrollBatch(
        observation=observation,
        behaviour={name: _time_major(views[f"behaviour:{name}"], slots) for name in behaviour},
        core_state=torch.from_numpy(views["core_state"][slots]),
        **rows,
    )


def assemble_sample(
    sample: ReplaySample, weight: npt.NDArray[np.float64], env: EnvSpec, core_size: int
) -> UnrollBatch:
    """Return sampled sequences as a batch, `[window, B, ...]`; plain rows are not copied.

    Args:
      sample: of a shard whose rows are `wire.row_fields`.
      weight: `<float64>[B]`, importance weights.
      env: the environment's spec.
      core_size: S.
    """
    rows = {name: torch.from_numpy(sample.rows[name]) for name in _ROWS}
    observation = {}
    for path, leaf in env.observation.items():
        frames = sample.rows[f"obs:{path}"]
        if leaf.stack > 1:
            prefix = sample.prefixes[f"obs:{path}"]
            frames = stack_frames(frames, prefix, sample.rows["start"])
        observation[path] = torch.from_numpy(frames)
    weights = torch.from_numpy(weight.astype(np.float32))
    core_state = sample.items.get("core_state")
    if core_state is None:
        core_state = np.zeros((len(weight), core_size), np.float32)
    return UnrollBatch(
        observation=observation,
        behaviour={"weight": weights.expand(len(sample.valid), -1)},
        core_state=torch.from_numpy(core_state),
        **rows,
    )


def columns(batch: UnrollBatch, chosen: torch.Tensor) -> UnrollBatch:
    """Return the unrolls `chosen`, `<int64>[n]`, of a batch."""
    return UnrollBatch(
        observation={path: leaf[:, chosen] for path, leaf in batch.observation.items()},
        behaviour={name: leaf[:, chosen] for name, leaf in batch.behaviour.items()},
        core_state=batch.core_state[chosen],
        **{name: getattr(batch, name)[:, chosen] for name in _ROWS},
    )


def part(batch: UnrollBatch, first: int, last: int, staging: Staging) -> UnrollBatch:
    """Begin to bring unrolls `first:last` of a batch to a device; `staging.join` ends it."""

    def rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return staging.put(name, tensor[:, first:last])

    return UnrollBatch(
        observation={p: rows(f"obs:{p}", leaf) for p, leaf in batch.observation.items()},
        behaviour={n: rows(f"behaviour:{n}", leaf) for n, leaf in batch.behaviour.items()},
        core_state=staging.put("core_state", batch.core_state[first:last]),
        **{name: rows(name, getattr(batch, name)) for name in _ROWS},
    )


def parts(
    batch: UnrollBatch, edges: npt.NDArray[np.int64], staging: Staging
) -> Iterator[UnrollBatch]:
    """Yield the unrolls between each two `edges`; the next are copied while one is used."""
    following: UnrollBatch | None = None
    for first, last in pairwise(edges.tolist()):
        ready, following = following, part(batch, first, last, staging)
        if ready is not None:
            yield ready
        staging.join()
    if following is not None:
        yield following


def save_batch(path: Path, batch: UnrollBatch) -> None:
    """Write a batch to an .npz file, for a look at what went wrong; nothing if that fails."""
    arrays = {f"obs:{k}": v.numpy() for k, v in batch.observation.items()}
    arrays |= {f"behaviour:{k}": v.numpy() for k, v in batch.behaviour.items()}
    rest = batch._asdict()
    del rest["observation"], rest["behaviour"]
    with contextlib.suppress(OSError):
        np.savez_compressed(path, **arrays, **{k: v.numpy() for k, v in rest.items()})
