"""Replay shards read back from disk, and redistributed over another number of shards.

See `shard_writer` for the format.
"""

from __future__ import annotations

import heapq
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcrl.compression import make_codec
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.records import ReplayUnroll
from hpcrl.replay.shard_writer import (
    END_MARK,
    FRAME,
    LENGTH,
    MAGIC,
    SCHEMA_VERSION,
    record_dtype,
)
from hpcrl.replay.storage import ReplayShard

_MAX_HEADER_BYTES = 1 << 24


class ReplayFileError(Exception):
    """A replay file is cut, damaged, or of another schema or layout."""


@dataclass(frozen=True)
class LoadReport:
    """What `load_shards` did.

    Attributes:
      restored_unrolls: unrolls added to the shard.
      evicted_unrolls: of these, how many were given up again because there was no room.
      items: items that can be sampled now.
      other_unrolls: unrolls of streams that belong to other shards.
      errors: one message per file that could not be read, or not to its end.
    """

    restored_unrolls: int
    evicted_unrolls: int
    items: int
    other_unrolls: int
    errors: tuple[str, ...]


class ShardFile:
    """A replay file opened for reading; use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Raises:
          ReplayFileError: it cannot be opened, or its header is not of this schema.
        """
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise ReplayFileError(f"{path}: {error.strerror}") from error
        try:
            self._read_header()
        except ReplayFileError:
            self._file.close()
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def unrolls(self) -> Iterator[ReplayUnroll]:
        """Iterate over the stored unrolls, oldest first.

        Raises:
          ReplayFileError: the file is cut or damaged here; everything before was sound.
        """
        for position in range(self.num_unrolls):
            where = f"unroll {position} of {self.num_unrolls}"
            length, crc = FRAME.unpack(self._read(FRAME.size, where))
            if length > 2 * self._dtype.itemsize + 1024:
                raise ReplayFileError(f"{self.path}: damaged at {where}")
            payload = self._read(length, where)
            if zlib.crc32(payload) != crc:
                raise ReplayFileError(f"{self.path}: damaged at {where} (checksum)")
            if self._codec is not None:
                payload = self._codec.decompress(payload)
            yield _unroll_of(np.frombuffer(payload, self._dtype)[0], self.layout)
        if self._read(len(END_MARK), "the end mark") != END_MARK:
            raise ReplayFileError(f"{self.path}: damaged at the end mark")

    def _read_header(self) -> None:
        if self._read(len(MAGIC), "the header") != MAGIC:
            raise ReplayFileError(f"{self.path}: not a replay file")
        (length,) = LENGTH.unpack(self._read(LENGTH.size, "the header"))
        if length > _MAX_HEADER_BYTES:
            raise ReplayFileError(f"{self.path}: damaged header")
        data = self._read(length, "the header")
        try:
            header = json.loads(data)
            version = header["schema_version"]
            if version != SCHEMA_VERSION:
                raise ReplayFileError(
                    f"{self.path}: schema version {version}, this program reads {SCHEMA_VERSION}"
                )
            self.layout = ReplayLayout.from_json(header["layout"])
            self.num_unrolls = int(header["num_unrolls"])
            self.oldest_serial = int(header["oldest_serial"])
            self.capacity_unrolls = int(header["capacity_unrolls"])
            self._codec = make_codec(header["compression"])
            self._dtype = record_dtype(self.layout)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ReplayFileError(f"{self.path}: damaged header ({error})") from error

    def _read(self, length: int, where: str) -> bytes:
        data = self._file.read(length)
        if len(data) != length:
            raise ReplayFileError(f"{self.path}: the file is cut at {where}")
        return data


def load_shards(
    paths: Sequence[Path], shard: ReplayShard, keep: Callable[[int], bool] | None = None
) -> LoadReport:
    """Add the unrolls of any number of shard files to a fresh shard.

    With L files and L' learners, every learner passes all L files and a `keep` that selects
    the streams it owns now. Unrolls keep their order within a stream; across files they are
    merged by age, so that the oldest are given up first where there is no room. What ends
    with the load: burn-in across the restart (a new run starts a new chain), and late
    priorities of draws made before.

    One file without `keep` into a shard of the same capacity gives back the same slots and
    generations, so that equal random numbers draw equal items.

    Args:
      paths: the files.
      shard: a shard that nothing was added to yet.
      keep: whether a stream id belongs to this shard; None keeps all.

    Returns:
      What was restored and what was not. A bad file costs its own unrolls only, and only
      those from the damage on.
    """
    errors: list[str] = []
    files: list[ShardFile] = []
    for path in paths:
        try:
            file = ShardFile(path)
        except ReplayFileError as error:
            errors.append(str(error))
            continue
        difference = _layout_difference(file.layout, shard.layout)
        if difference:
            errors.append(f"{path}: stored with another layout: {difference}")
            file.__exit__()
        else:
            files.append(file)
    same_place = len(paths) == len(files) == 1 and keep is None
    if same_place and files[0].capacity_unrolls == shard.capacity_unrolls:
        shard.start_at(files[0].oldest_serial)
    restored = other = 0
    try:
        streams = [_by_age(file, errors) for file in files]
        for _, unroll in heapq.merge(*streams, key=lambda pair: -pair[0]):
            if keep is None or keep(unroll.stream_id):
                shard.add(unroll)
                restored += 1
            else:
                other += 1
    finally:
        for file in files:
            file.__exit__()
    return LoadReport(
        restored_unrolls=restored,
        evicted_unrolls=shard.counters.evicted_unrolls,
        items=shard.size,
        other_unrolls=other,
        errors=tuple(errors),
    )


def _by_age(file: ShardFile, errors: list[str]) -> Iterator[tuple[int, ReplayUnroll]]:
    """Yield (age in unrolls, unroll), oldest first; stop with a message at damage."""
    restored = 0
    try:
        for unroll in file.unrolls():
            yield file.num_unrolls - 1 - restored, unroll
            restored += 1
    except ReplayFileError as error:
        errors.append(f"{error}; its first {restored} of {file.num_unrolls} unrolls were read")


def _unroll_of(record: np.void, layout: ReplayLayout) -> ReplayUnroll:
    return ReplayUnroll(
        stream_id=int(record["stream_id"]),
        run_id=int(record["run_id"]),
        unroll_index=int(record["unroll_index"]),
        rows={path: record[f"row:{path}"] for path in layout.rows},
        items={path: record[f"item:{path}"] for path in layout.items},
        priorities=record["priorities"],
        eligible=record["eligible"],
    )


def _layout_difference(stored: ReplayLayout, wanted: ReplayLayout) -> str:
    """Name the fields that differ, with both values; empty if none does."""
    old, new = stored.to_json(), wanted.to_json()
    return "; ".join(
        f"{name} is {old[name]}, expected {new[name]}" for name in new if old[name] != new[name]
    )
