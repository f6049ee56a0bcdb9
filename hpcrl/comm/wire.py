"""Every message, declared once as data; both ends build their buffers from it.

A layout is an ordered list of named fields at 64-byte aligned offsets. Its digest is
compared between all ranks at start-up, so that two ends never disagree silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcrl.specs import ENV_FAILURES, ArraySpec, EnvSpec

_ALIGN_BYTES = 64


class Tag(IntEnum):
    """Message tags; step messages add the group index to theirs."""

    PING = 1
    UNROLL = 2
    WEIGHTS_REQUEST = 3
    WEIGHTS = 4
    COMMAND = 5
    STATS = 6
    DONE = 7
    ROUND = 8
    LEAVE = 9
    GRADIENT = 10
    PARAMETERS = 11
    SHARD = 12
    STOP_WANTED = 13
    STEP = 100
    REPLY = 10000


class Command(IntEnum):
    """What one rank tells another.

    A reply asks an actor to ACT or STOP; a learner its clients to STOP, then to EXIT; the root the
    other parameter servers for their shards (COLLECT).
    """

    ACT = 0
    STOP = 1
    EXIT = 2
    COLLECT = 3


@dataclass(frozen=True)
class Layout:
    """Named arrays in one buffer.

    Attributes:
      name: for error messages and the digest.
      fields: shape and dtype by field name, in wire order.
    """

    name: str
    fields: Mapping[str, ArraySpec]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of every field, a multiple of 64."""
        offsets, end = {}, 0
        for name, spec in self.fields.items():
            offsets[name] = end
            end = -(-(end + spec.nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one message, a multiple of 64."""
        last = list(self.fields)[-1]
        end = self.offsets[last] + self.fields[last].nbytes
        return -(-end // _ALIGN_BYTES) * _ALIGN_BYTES

    def buffer(self, *leading: int) -> npt.NDArray[np.uint8]:
        """Return a zeroed buffer `<uint8>[*leading, nbytes]`."""
        return np.zeros((*leading, self.nbytes), np.uint8)

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Return a view `[*leading, *shape]` of every field of `buffer`, without copying.

        Args:
          buffer: `<uint8>[*leading, nbytes]`, each message contiguous.
        """
        if buffer.shape[-1] != self.nbytes or buffer.dtype != np.uint8:
            raise ValueError(
                f"{self.name}: expected uint8 [..., {self.nbytes}], got {buffer.shape}"
            )
        leading, strides = buffer.shape[:-1], buffer.strides[:-1]
        views = {}
        for name, spec in self.fields.items():
            dtype = np.dtype(spec.dtype)
            inner = np.empty(spec.shape, dtype).strides
            views[name] = np.ndarray(
                (*leading, *spec.shape), dtype, buffer.data, self.offsets[name], (*strides, *inner)
            )
        return views

    @property
    def digest(self) -> int:
        """63-bit digest of names, dtypes, shapes and order."""
        text = repr([self.name, [(n, s.dtype, s.shape) for n, s in self.fields.items()]])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _scalar(dtype: str, *shape: int) -> ArraySpec:
    return ArraySpec(shape, dtype)


def step_layout(env: EnvSpec, rows: int, timers: int) -> Layout:
    """One actor group's step: E rows of what the environments gave, and the actor's timers.

    The final observations come last: a message without truncated episodes ends before them
    (`step_short_nbytes`).
    """
    fields = {
        "sequence": _scalar("int64"),
        "timers_s": _scalar("float64", timers),
        "failures": _scalar("int64", len(ENV_FAILURES)),
        "run_id": _scalar("int64", rows),
        "valid": _scalar("bool", rows),
        "reward": _scalar("float32", rows),
        "terminated": _scalar("bool", rows),
        "truncated": _scalar("bool", rows),
        "ended": _scalar("bool", rows),
        "episode_return": _scalar("float32", rows),
        "episode_steps": _scalar("int32", rows),
    }
    for prefix in ("obs", "final"):
        for path, leaf in env.observation.items():
            fields[f"{prefix}:{path}"] = ArraySpec((rows, *leaf.array.shape), leaf.array.dtype)
    return Layout("step", fields)


def step_short_nbytes(env: EnvSpec, layout: Layout) -> int:
    """Bytes of a step message that carries no final observation."""
    return layout.offsets[f"final:{next(iter(env.observation))}"]


def reply_layout(env: EnvSpec, rows: int) -> Layout:
    """The answer to a step: a command, the step's sequence number, and the actions."""
    return Layout(
        "reply",
        {
            "command": _scalar("int64"),
            "sequence": _scalar("int64"),
            "action": ArraySpec((rows, env.action.size), env.action.dtype),
        },
    )


def row_fields(env: EnvSpec, behaviour: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """What is kept of one agent step, without the time axis (see `types` for its semantics)."""
    fields = {
        "reward": _scalar("float32"),
        "terminated": _scalar("bool"),
        "start": _scalar("bool"),
        "final": _scalar("bool"),
        "previous_action": env.action.array,
        "action": env.action.array,
        "policy_version": _scalar("int64"),
    }
    fields |= {f"behaviour:{name}": spec for name, spec in behaviour.items()}
    fields |= {f"obs:{path}": leaf.array for path, leaf in env.observation.items()}
    return fields


def unroll_layout(
    env: EnvSpec,
    behaviour: Mapping[str, ArraySpec],
    unroll_steps: int,
    core_size: int,
    replay_items: int = 0,
) -> Layout:
    """One unroll: T+1 rows, the recurrent state and the frames before row 0.

    For a replay the state is that before the burn-in rows of row 0, the initial priorities of
    the unroll's items come with it, and the frames before row 0 don't: they are stored.
    """
    fields = {
        "env_id": _scalar("int64"),
        "run_id": _scalar("int64"),
        "unroll_index": _scalar("int64"),
        "core_state": _scalar("float32", core_size),
    }
    if replay_items:
        fields["priority"] = _scalar("float32", replay_items)
    for path, leaf in env.observation.items():
        if leaf.stack > 1 and not replay_items:
            shape = (leaf.stack - 1, *leaf.array.shape)
            fields[f"prefix:{path}"] = ArraySpec(shape, leaf.array.dtype)
    for name, spec in row_fields(env, behaviour).items():
        fields[name] = ArraySpec((unroll_steps + 1, *spec.shape), spec.dtype)
    return Layout("unroll", fields)


def weights_layout(num_parameters: int) -> Layout:
    """A whole copy of the network's parameters, their version and the frames behind them."""
    return Layout(
        "weights",
        {
            "version": _scalar("int64"),
            "frames": _scalar("int64"),
            "parameters": _scalar("float32", num_parameters),
        },
    )


METRIC_PREFIX = "metric:"
"""Before the name of an agent's metric among the fields of a gradient message."""


def gradient_layout(shard_size: int, metrics: Sequence[str]) -> Layout:
    """One shard's part of a worker's gradient, and the figures of the whole.

    `version` is that of the shard that it was computed from; `num_steps` 0 only asks for the
    parameters. What became of the worker's gradient before this one, on all shards, comes with it
    (applied to and dropped by so many shards; the lag where it was applied).
    """
    return Layout(
        "gradient",
        {
            **{name: _scalar("int64") for name in ("version", "num_steps")},
            **{name: _scalar("int64") for name in ("applied", "dropped", "lag_sum", "lag_max")},
            **{name: _scalar("float64") for name in ("loss", "grad_norm")},
            **{f"{METRIC_PREFIX}{name}": _scalar("float64") for name in metrics},
            "gradient": _scalar("float32", shard_size),
        },
    )


def parameters_layout(shard_size: int) -> Layout:
    """A shard as it is, and whether the gradient that it answers was applied, how late.

    The lag is 0 where a gradient was not even looked at, as the run ends.
    """
    return Layout(
        "parameters",
        {
            "version": _scalar("int64"),
            "lag": _scalar("int64"),
            "applied": _scalar("bool"),
            "parameters": _scalar("float32", shard_size),
        },
    )


def shard_state_layout(shard_size: int, arrays: Sequence[str]) -> Layout:
    """A shard with its optimizer's state, for a checkpoint."""
    return Layout(
        "shard_state",
        {
            "version": _scalar("int64"),
            "step_count": _scalar("int64"),
            **{name: _scalar("float32", shard_size) for name in arrays},
        },
    )


def weights_request_layout() -> Layout:
    """Asks for weights newer than `have_version`."""
    return Layout("weights_request", {"have_version": _scalar("int64")})


def command_layout() -> Layout:
    """A `Command` from a learner to its inference ranks."""
    return Layout("command", {"command": _scalar("int64")})


def code_layout() -> Layout:
    """A rank's exit code on its way up, the job's on its way down."""
    return Layout("code", {"code": ArraySpec((), "int64")})


def stats_layout(counters: tuple[str, ...], episodes: int) -> Layout:
    """Counters since the previous report, and the episodes that ended."""
    return Layout(
        "stats",
        {
            **{name: _scalar("float64") for name in counters},
            "num_episodes": _scalar("int64"),
            "episode_evaluation": _scalar("bool", episodes),
            "episode_return": _scalar("float32", episodes),
            "episode_steps": _scalar("int32", episodes),
        },
    )


def round_layout(episodes: int) -> Layout:
    """What an evaluator's round of episodes came to, and the weights that played it."""
    return Layout(
        "round",
        {
            "version": _scalar("int64"),
            "frames": _scalar("int64"),
            "seconds": _scalar("float64"),
            "episode_return": _scalar("float64", episodes),
            "episode_steps": _scalar("int64", episodes),
            "cut_off": _scalar("bool", episodes),
        },
    )


def digest(*layouts: Layout) -> int:
    """One digest over several layouts."""
    text = " ".join(str(layout.digest) for layout in layouts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
