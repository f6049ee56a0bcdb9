"""Trajectory segments as files: found, opened even after a kill, and checked."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from analysis.errors import DataError
from analysis.open_segments import open_view

FORMAT = "hpcrl-trajectories"
SCHEMA_VERSION = 1

_NAME = re.compile(r"seg-(\d+)\.h5(\.part)?$")
_WRITER = re.compile(r"(?P<role>.+)-(?P<index>\d+)-(?P<restart>\d+)$")
_ATTEMPTS = 5
_PAUSE_S = 0.01

T = TypeVar("T")


def find_segments(trajectories: Path) -> list[Path]:
    """Return the files of all segments in order of writing, one of each.

    A `.part` beside the closed segment of its number is an older copy of it, such as a repeated
    copy of a running run leaves: all it holds is in the closed one, which is taken.
    """
    paths = [p for p in trajectories.glob("*-*-*/seg-*.h5*") if _NAME.search(p.name)]
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(paths, key=lambda p: (p.parent.name, segment_number(p), p.name)):
        found.setdefault((path.parent.name, segment_number(path)), path)
    return list(found.values())


def segment_number(path: Path) -> int:
    """Return a segment's number within its writer.

    Raises:
      DataError: the file isn't named as a segment.
    """
    match = _NAME.search(path.name)
    if match is None:
        raise DataError(f"{path} is not named seg-NUMBER.h5")
    return int(match[1])


def writer_parts(writer: str) -> tuple[str, int, int]:
    """Return role, index and restart from a writer's folder name."""
    match = _WRITER.match(writer)
    if match is None:
        raise DataError(f"{writer} is not named ROLE-INDEX-RESTART, as a writer's folder is")
    return match["role"], int(match["index"]), int(match["restart"])


def open_file(path: Path) -> tuple[h5py.File, Path]:
    """Open a segment, closed or not; return it and its path.

    Locks are not taken: they fail on some parallel file systems, and segments have one writer.
    A `.part` that is gone has been closed, and renamed, since it was listed.

    Raises:
      OSError: it can't be read.
    """
    if path.suffix == ".part":
        try:
            return open_view(path), path
        except FileNotFoundError:
            path = path.with_suffix("")
    return h5py.File(path, "r", locking=False), path


def readable(path: Path, what: str, read: Callable[[], T]) -> T:
    """Return read(), in a few attempts where a writer may just be changing what is read.

    Args:
      path: of the segment.
      what: is read, for the message: "" or words with a leading space.
      read: what h5py does.

    Raises:
      DataError: it fails.
    """
    attempts = _ATTEMPTS if path.suffix == ".part" else 1
    for attempt in range(1, attempts + 1):
        try:
            return read()
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            if attempt == attempts:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise DataError(f"{path} is damaged{what}: {text}") from None
        time.sleep(_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


@dataclass
class Segment:
    """One readable segment.

    Attributes:
      path: of the file.
      number: within its writer.
      attributes: of the root.
      env: the environment's spec as recorded.
      columns: step columns by name: shape without the time axis, and dtype.
      index: the episode index, arrays `[n]` by name, whole episodes only.
      num_steps: steps that the index covers.
      unindexed_steps: steps on disk beyond the last whole episode.
    """

    path: Path
    number: int
    attributes: dict[str, Any]
    env: dict[str, Any]
    columns: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    index: dict[str, NDArray[Any]]
    num_steps: int
    unindexed_steps: int = 0
    _files: dict[int, h5py.File] = field(default_factory=dict, repr=False)
    _datasets: dict[tuple[int, str], Any] = field(default_factory=dict, repr=False)

    @property
    def writer(self) -> str:
        """Role, index and restart of who wrote it, such as "inference-0-1"."""
        return self.path.parent.name

    @property
    def finished(self) -> bool:
        """Whether the writer closed it."""
        return self.path.suffix == ".h5"

    @property
    def end(self) -> str:
        """Why it was closed: "followed" by another, "finished", "max_bytes"; "" where untold."""
        return str(np.bytes_(self.attributes.get("end", b"")).decode())

    @property
    def role_restart(self) -> tuple[str, int, int]:
        """Role, role index and restart of the writer."""
        return writer_parts(self.writer)

    @property
    def topology(self) -> dict[str, Any]:
        """Nodes and ranks of the job that wrote it, empty where untold."""
        return topology_in(self.attributes)

    def file(self) -> h5py.File:
        """The open file, one per process, so that forked workers don't share a handle."""
        process = os.getpid()
        if process not in self._files:
            self._files[process] = open_file(self.path)[0]
        return self._files[process]

    def read(self, column: str, first: int, last: int) -> NDArray[Any]:
        """Return rows `first:last` of a step column.

        Raises:
          DataError: they can't be read.
        """
        rows: NDArray[Any] = self._read(f"steps/{column}", slice(first, last))
        return rows

    def final_observation(self, row: int) -> dict[str, NDArray[Any]]:
        """Return the leaves of the final observation in `row`.

        Raises:
          DataError: they can't be read.
        """
        leaves = [name for name in self.columns if name.startswith("observation/")]
        return {
            name.removeprefix("observation/"): self._read(f"final_{name}", row) for name in leaves
        }

    def _read(self, name: str, rows: int | slice) -> Any:
        def read() -> Any:
            try:
                return self._dataset(name)[rows]
            except BaseException:
                self.close()  # what HDF5 holds in memory of it may be what was unreadable
                raise

        where = f"{rows.start}:{rows.stop}" if isinstance(rows, slice) else str(rows)
        return readable(self.path, f": {name} {where} can't be read", read)

    def _dataset(self, name: str) -> Any:
        key = (os.getpid(), name)
        if key not in self._datasets:
            self._datasets[key] = self.file()[name]
        return self._datasets[key]

    def close(self) -> None:
        """Close this process's handle."""
        self._datasets.clear()
        file = self._files.pop(os.getpid(), None)
        if file is not None:
            file.close()


def topology_in(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return what a segment's attributes say of nodes and ranks of its job, {} where nothing."""
    topology = json.loads(attributes.get("topology", "{}"))
    if not isinstance(topology, dict):
        raise ValueError(f"its attribute topology is {topology!r:.40}, no mapping")
    return topology


def joined_index(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    """Return the episode indices of all segments as one, `start` counted over all of them."""
    columns = {
        name: np.concatenate([segment.index[name] for segment in segments])
        for name in segments[0].index
    }
    before = np.cumsum([0, *(segment.num_steps for segment in segments[:-1])])
    columns["start"] += np.repeat(before, [len(segment.index["start"]) for segment in segments])
    return columns


def leaf_datasets(group: Any) -> dict[str, Any]:
    """Return all datasets below an HDF5 group by their path in it."""
    found: dict[str, Any] = {}
    if group is not None:
        group.visititems(
            lambda name, item: found.update({name: item}) if hasattr(item, "dtype") else None
        )
    return found


def load_segment(path: Path) -> Segment:
    """Read what describes a segment, and its episode index.

    Raises:
      DataError: it is damaged, or of another format or schema version.
    """
    segment_number(path)
    return readable(path, "", lambda: _opened(path, _describe))


def segment_attributes(path: Path) -> dict[str, Any]:
    """Return the root attributes of a segment, whatever state the rest of it is in.

    Raises:
      DataError: they can't be read, or are of another format or schema version.
    """
    return readable(path, "", lambda: _opened(path, lambda file, path: _attributes(file, path)))


def _opened(path: Path, describe: Callable[[h5py.File, Path], T]) -> T:
    file, path = open_file(path)
    try:
        return describe(file, path)
    finally:
        file.close()


def _attributes(file: h5py.File, path: Path) -> dict[str, Any]:
    attributes = dict(file.attrs)
    if attributes.get("format") != FORMAT:
        raise DataError(f"{path} is no segment of hpcrl trajectories: attribute format is missing")
    if attributes["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema version {attributes['schema_version']}, this analysis reads "
            f"version {SCHEMA_VERSION}: use the version of hpcrl that wrote it "
            f"({attributes.get('code_version', 'unknown')})"
        )
    topology_in(attributes)  # which is no JSON where it is damaged
    return attributes


def _describe(file: h5py.File, path: Path) -> Segment:
    attributes = _attributes(file, path)
    closed = path.suffix == ".h5"
    rows_of = len if closed else rows_on_disk
    steps = leaf_datasets(file["steps"])
    rows = min(map(rows_of, steps.values()))
    finals = min(map(rows_of, leaf_datasets(file.get("final_observation")).values()), default=0)
    episodes = leaf_datasets(file["episodes"])
    count = min(map(rows_of, episodes.values()))
    index = {name: data[:count] for name, data in episodes.items()}
    ends = _ends(index)
    whole = int(np.searchsorted(ends, rows, side="right"))
    without_final = np.flatnonzero(index["final"][:whole] >= finals)
    if len(without_final):
        whole = int(without_final[0])
    num_steps = int(ends[whole - 1]) if whole else 0
    if closed and (whole < count or num_steps != rows):
        raise ValueError(f"its index covers {num_steps} of {rows} steps")
    return Segment(
        path=path,
        number=segment_number(path),
        attributes=attributes,
        env=json.loads(attributes["env"]),
        columns={name: (data.shape[1:], data.dtype) for name, data in steps.items()},
        index={name: values[:whole] for name, values in index.items()},
        num_steps=num_steps,
        unindexed_steps=rows - num_steps,
    )


def rows_on_disk(dataset: Any) -> int:
    """Return how many of the first rows of an open segment's dataset have all their chunks.

    In a file that was cut, or whose writer was killed, the length may say more than there is.
    """
    size = dataset.file.id.get_filesize()
    others = [0] * (dataset.ndim - 1)
    for first in range(0, len(dataset), dataset.chunks[0]):
        chunk = dataset.id.get_chunk_info_by_coord((first, *others))
        if chunk.byte_offset is None or chunk.byte_offset + chunk.size > size:
            return first
    return len(dataset)


def _ends(index: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Return where the episodes end, `[n]`, each after one step or more where the next begins."""
    start, length = index["start"], index["length"]
    ends: NDArray[np.int64] = start + length
    before = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    wrong = np.flatnonzero((length <= 0) | (start != before))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"line {row} of its index is an episode of {length[row]} steps from {start[row]}, "
            f"where {before[row]} comes next"
        )
    return ends
