"""One HDF5 segment with one writer; the only importer of h5py.

The file is in HDF5's single-writer mode (SWMR) while it is open: every state that a kill can
leave it in is one that a reader can open. For that it needs the format of HDF5 1.10, which is
also the newest that is used, so that the tools of 1.10 read it. That mode begins before the file
gets the name that readers look for, and the file is never opened for writing a second time: HDF5
would mark it as being written, in a way that no reader passes over.

Only whole chunks of frames are written, so no chunk is compressed twice and none moves. Rows
that don't fill a chunk wait in memory; where no column is wide, none does. An episode enters the
index when its rows are flushed. Each write costs two milliseconds for its many columns, so chunks
wait for one another, up to a second: writing after every episode of Atari takes 12 µs of processor
time a step more than the 22 µs that recording takes, and the running episodes, which a kill loses
in any case, are more than those of a second.

Frames are compressed here and handed to HDF5 as they are to lie on disk, since nothing else in
the process runs during a call of h5py.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import numpy.typing as npt

from hpcrl.durable import sync_directory, sync_file
from hpcrl.recording.chunks import ChunkBuffer
from hpcrl.recording.deflate import deflate
from hpcrl.specs import ArraySpec

Array = npt.NDArray[np.generic]

SCHEMA_VERSION = 1
FORMAT = "hpcrl-trajectories"

_LIBVER = ("v110", "v110")
_CHUNK_BYTES = 2**18
_MAX_QUANTUM_ROWS = 1024
_NARROW_CHUNK_ROWS = 4096
_EPISODE_CHUNK_ROWS = 1024
_SLACK_BYTES = 2**17
_BATCH_BYTES = 2**23
FLUSH_S = 1.0
"""What could be written waits for more to be written with, for so long and up to 8 MiB."""
_WIDE_BYTES = 256

_NEVER_FREED: list[Any] = []
"""What HDF5 can't close and must never free."""

EPISODE_COLUMNS = {
    "start": "int64",
    "length": "int64",
    "return": "float64",
    "env_id": "int64",
    "episode": "int64",
    "env_seed": "int64",
    "evaluation": "bool",
    "complete": "bool",
    "terminated": "bool",
    "truncated": "bool",
    "final": "int64",
    "first_policy_version": "int64",
    "last_policy_version": "int64",
    "end_unix_s": "float64",
}
"""The episode index. `start` is the first step's row; `final` the row of /final_observation, or
-1 where the episode terminated, whose last observation nobody sees."""


End = Literal["followed", "finished", "max_bytes"]
"""Why a segment was closed: the writer's next one follows, it has no more, or no more room."""

CLOSING_ATTRIBUTES: dict[str, Array] = {
    "closed": np.array(False),
    "end": np.array("", "S16"),
    "first_policy_version": np.array(-1, np.int64),
    "last_policy_version": np.array(-1, np.int64),
    "dropped_episodes": np.array(0, np.int64),
    "closed_unix_s": np.array(0, np.float64),
}
"""Root attributes that `close` sets, and what they are before that. All are of fixed size: in
single-writer mode none can be added, but one can be overwritten where it is."""


def filter_arguments(compression: str) -> dict[str, Any]:
    """Return h5py's arguments for `gzip-N`, `lzf` or `none`."""
    name, _, level = compression.partition("-")
    if name == "none":
        return {}
    return {"compression": name, **({"compression_opts": int(level)} if level else {})}


def take_rows(arrays: deque[Array], count: int) -> Array:
    """Remove the first `count` rows of `arrays`, which have as many, and return them as one."""
    taken: list[Array] = []
    while count:
        rows = arrays.popleft()
        taken.append(rows[:count])
        if len(rows) > count:
            arrays.appendleft(rows[count:])
        count -= len(taken[-1])
    return np.concatenate(taken)


def reserve_bytes(columns: Mapping[str, ArraySpec]) -> int:
    """Return a bound on what a segment takes beside the bytes of its steps.

    The last chunk of every narrow column and of the index is allocated whole; attributes, the
    object headers and the chunks' index come to less than the slack of 128 KiB per segment.
    """
    narrow = sum(spec.nbytes for spec in columns.values() if spec.nbytes < _WIDE_BYTES)
    final = sum(s.nbytes for n, s in columns.items() if n.startswith("observation/"))
    index = sum(np.dtype(dtype).itemsize for dtype in EPISODE_COLUMNS.values())
    chunks = _NARROW_CHUNK_ROWS * (narrow + min(final, narrow)) + _EPISODE_CHUNK_ROWS * index
    return chunks + final + _SLACK_BYTES


class SegmentWriter:
    """Appends whole episodes to PATH.part; `close` makes it PATH.

    Args:
      path: final name of the segment, which must not exist.
      columns: step columns without their time axis; `observation/...` also gives the leaves of
        the final observations.
      attributes: what describes the recording: strings and numbers.
      compression: filter of the columns of 256 and more bytes per step. Narrower ones are
        rewritten in place as they grow, so they are not compressed.
      clock: monotonic seconds.

    Attributes:
      nbytes: on disk.
      pending_bytes: of what was appended and isn't on disk, if nothing could be compressed.

    Raises:
      OSError: it can't be written, here and in all methods.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, ArraySpec],
        attributes: Mapping[str, str | int | float],
        compression: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._next_s = clock() + FLUSH_S
        self.path = path
        self.partial = path.with_name(path.name + ".part")
        if path.exists():
            raise FileExistsError(f"{path} exists")
        widest = max(spec.nbytes for spec in columns.values())
        quantum = max(1, min(_MAX_QUANTUM_ROWS, _CHUNK_BYTES // max(widest, 1)))
        self._quantum = 1 << (quantum.bit_length() - 1) if widest >= _WIDE_BYTES else 1
        self._batch_rows = _BATCH_BYTES // max(widest, 1)
        self._filter = filter_arguments(compression)
        unborn = path.with_name(f".{path.name}.tmp")
        self._file = h5py.File(unborn, "w", libver=_LIBVER, locking="best-effort")
        try:
            self._lay_out(columns, attributes)
        except (OSError, RuntimeError, ValueError):
            _close_into_memory(self, self._file)
            raise
        unborn.rename(self.partial)
        gzip_level = self._filter.get("compression_opts")
        self._chunked = {
            name: ChunkBuffer(spec, self._quantum, deflate(gzip_level))
            for name, spec in columns.items()
            if gzip_level and spec.nbytes >= _WIDE_BYTES
        }
        self._pending: dict[str, deque[Array]] = {
            name: deque() for name in columns if name not in self._chunked
        }
        self._row_bytes = sum(spec.nbytes for spec in columns.values())
        self.pending_bytes = 0
        self.nbytes = self.partial.stat().st_size
        self._entries: list[dict[str, Any]] = []
        self._num_finals = 0
        self._appended = 0
        self._written = 0
        self.flushed_episodes = 0

    def _lay_out(
        self, columns: Mapping[str, ArraySpec], attributes: Mapping[str, str | int | float]
    ) -> None:
        described = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **attributes}
        self._file.attrs.update({**described, **CLOSING_ATTRIBUTES})
        self._steps = {n: self._column(f"steps/{n}", s, self._quantum) for n, s in columns.items()}
        self._final = {
            name.removeprefix("observation/"): self._column(f"final_{name}", spec, 1)
            for name, spec in columns.items()
            if name.startswith("observation/")
        }
        self._episodes = {
            name: self._file.create_dataset(
                f"episodes/{name}", (0,), dtype, maxshape=(None,), chunks=(_EPISODE_CHUNK_ROWS,)
            )
            for name, dtype in EPISODE_COLUMNS.items()
        }
        self._file.swmr_mode = True

    def _column(self, name: str, spec: ArraySpec, quantum: int) -> Any:
        wide = spec.nbytes >= _WIDE_BYTES
        chunk = quantum if wide else max(_NARROW_CHUNK_ROWS, quantum)
        return self._file.create_dataset(
            name,
            shape=(0, *spec.shape),
            maxshape=(None, *spec.shape),
            chunks=(chunk, *spec.shape),
            dtype=spec.dtype,
            **(self._filter if wide else {}),
        )

    @property
    def flushed_steps(self) -> int:
        """Steps that a kill doesn't take away; so for `flushed_episodes`, those of them whole."""
        return self._written

    def append(
        self,
        steps: Mapping[str, Sequence[Array]],
        final: Mapping[str, Array] | None,
        entry: Mapping[str, Any],
    ) -> None:
        """Append one episode.

        Args:
          steps: every step column in pieces `[n, ...]`, T rows together.
          final: leaves of the observation after the last step, if there is one.
          entry: its line of the index, but for `start`, `length` and `final`.
        """
        count = sum(map(len, steps["reward"]))
        place = -1
        if final is not None and self._final:
            place = self._num_finals
            for name, dataset in self._final.items():
                rows = np.asarray(final[name])[None]
                _extend(dataset, place, rows)
                self.pending_bytes += rows.nbytes
            self._num_finals += 1
        for name, buffer in self._chunked.items():
            buffer.append(steps[name])
        for name, arrays in self._pending.items():
            arrays.extend(piece for piece in steps[name] if len(piece))
        self._entries.append({**entry, "start": self._appended, "length": count, "final": place})
        self._appended += count
        self.pending_bytes += count * self._row_bytes
        if self._appended - self._written >= self._batch_rows:
            self._write_chunks()
        else:
            self.flush_when_due()

    def flush_when_due(self) -> None:
        """Write the whole chunks that have waited for long enough."""
        if self._clock() >= self._next_s:
            self._write_chunks()

    def _write_chunks(self) -> None:
        self._next_s = self._clock() + FLUSH_S
        whole = (self._appended - self._written) // self._quantum * self._quantum
        if whole:
            self._write(whole)

    def _write(self, count: int) -> None:
        """Write `count` pending steps, then the index of the episodes that are whole by then."""
        for name, buffer in self._chunked.items():
            _extend_by_chunks(self._steps[name], self._written, count, buffer.take())
        for name, pending in self._pending.items():
            _extend(self._steps[name], self._written, take_rows(pending, count))
            # What is left may be a view of much more.
            self._pending[name] = deque(rows.copy() for rows in pending)
        self._written += count
        self._flush()
        ready = [e for e in self._entries if e["start"] + e["length"] <= self._written]
        if not ready:
            return
        self._entries = self._entries[len(ready) :]
        for name, dataset in self._episodes.items():
            values = np.array([entry[name] for entry in ready], EPISODE_COLUMNS[name])
            _extend(dataset, self.flushed_episodes, values)
        self._flush()
        self.flushed_episodes += len(ready)

    def _flush(self) -> None:
        self._file.flush()
        self.nbytes = self.partial.stat().st_size
        self.pending_bytes = (self._appended - self._written) * self._row_bytes

    def close(self, end: End, attributes: Mapping[str, int | float]) -> None:
        """Write the rest, make the file durable and give it its final name.

        Hazard: a kill may come between any two of these calls. What is flushed stays readable, as
        HDF5 ends single-writer mode by overwriting one flag, after all else is on disk.

        Args:
          end: why it is closed.
          attributes: more of `CLOSING_ATTRIBUTES`.
        """
        for buffer in self._chunked.values():
            buffer.fill_up()
        if self._appended > self._written:
            self._write(self._appended - self._written)
        for name, value in {**attributes, "end": np.array(end, "S16"), "closed": True}.items():
            self._file.attrs.modify(name, np.asarray(value, CLOSING_ATTRIBUTES[name].dtype))
        self._file.flush()
        sync_file(self.partial)
        self._file.close()
        sync_file(self.partial)
        self.partial.rename(self.path)
        sync_directory(self.path.parent)

    def abandon(self) -> None:
        """Close after an error, leaving what was flushed in the `.part` file.

        HDF5 crashes the process when an object of a file is freed that it could not close, and a
        disk that is full lets it close none. So it closes into memory, of which nothing is kept.
        """
        _close_into_memory(self, self._file)


def _close_into_memory(owner: SegmentWriter, file: Any) -> None:
    try:
        descriptor = file.id.get_vfd_handle()
        memory = os.memfd_create("hpcrl-abandoned", os.MFD_CLOEXEC)
        os.ftruncate(memory, os.fstat(descriptor).st_size)
        os.dup2(memory, descriptor, inheritable=False)
        os.close(memory)
        file.close()
    except (OSError, RuntimeError, ValueError):
        _NEVER_FREED.extend([owner, file])


def _extend(dataset: Any, length: int, rows: Array) -> None:
    """Append rows `[n, ...]`; by h5py's lower level, which takes half the time for so few."""
    shape = rows.shape[1:]
    dataset.id.set_extent((length + len(rows), *shape))
    place = dataset.id.get_space()
    place.select_hyperslab((length, *[0] * len(shape)), rows.shape)
    dataset.id.write(h5py.h5s.create_simple(rows.shape), place, np.ascontiguousarray(rows))


def _extend_by_chunks(dataset: Any, length: int, count: int, chunks: Sequence[bytes]) -> None:
    """Append `count` rows, compressed; `length` is a multiple of the chunk's rows."""
    frame = dataset.shape[1:]
    dataset.id.set_extent((length + count, *frame))
    for place, chunk in zip(range(length, length + count, dataset.chunks[0]), chunks, strict=True):
        dataset.id.write_direct_chunk((place, *[0] * len(frame)), chunk)


def existing_segments(folder: Path) -> Sequence[Path]:
    """Return segments in `folder`, closed or not."""
    return sorted(folder.glob("seg-*.h5*"))
