"""Trajectory segments as files: found, opened even after a kill, and checked."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from analysis.errors import DataError

FORMAT = "hpcrl-trajectories"
SCHEMA_VERSION = 1

_NAME = re.compile(r"seg-(\d+)\.h5(\.part)?$")
_WRITER = re.compile(r"(?P<role>.+)-(?P<index>\d+)-(?P<restart>\d+)$")


def is_selected(env_id: int, episode: int, fraction: float) -> bool:
    """Whether an episode belongs to the recorded `fraction`, by the writer's own rule."""
    digest = hashlib.blake2b(f"{env_id}/{episode}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def open_file(path: Path) -> tuple[h5py.File, bool]:
    """Open a file that may have been killed; return it and whether it was properly closed.

    Locks are not taken: they fail on some parallel file systems, and segments have one writer.
    Only a `.part` is opened as a file with a writer: in that mode HDF5 doesn't notice that the end
    of a file is missing. One that is gone has been closed, and renamed, since it was listed or
    since the first attempt.

    Raises:
      OSError: it can't be read in any mode.
    """
    try:
        return h5py.File(path, "r", locking=False), True
    except OSError:
        if path.suffix != ".part":
            raise
    try:
        return h5py.File(path, "r", swmr=True, locking=False), False
    except FileNotFoundError:
        return h5py.File(path.with_suffix(""), "r", locking=False), True


@dataclass
class Segment:
    """One readable segment.

    Attributes:
      path: of the file.
      writer: role, index and restart of who wrote it, such as "inference-0-1".
      number: within its writer.
      attributes: of the root.
      env: the environment's spec as recorded.
      columns: step columns by name: shape without the time axis, and dtype.
      index: the episode index, arrays `[n]` by name, whole episodes only.
      num_steps: steps that the index covers.
      finished: whether the writer closed it.
      unindexed_steps: steps on disk beyond the last whole episode.
    """

    path: Path
    writer: str
    number: int
    attributes: dict[str, Any]
    env: dict[str, Any]
    columns: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    index: dict[str, NDArray[Any]]
    num_steps: int
    finished: bool
    unindexed_steps: int = 0
    _files: dict[int, h5py.File] = field(default_factory=dict, repr=False)
    _datasets: dict[tuple[int, str], Any] = field(default_factory=dict, repr=False)

    @property
    def end(self) -> str:
        """Why it was closed: "followed" by another, "finished", "max_bytes"; "" where untold."""
        return str(np.bytes_(self.attributes.get("end", b"")).decode())

    @property
    def role_restart(self) -> tuple[str, int, int]:
        """Role, role index and restart of the writer."""
        return writer_parts(self.writer)

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
        try:
            rows: NDArray[Any] = self._dataset(column)[first:last]
        except OSError as error:
            raise DataError(
                f"{self.path} is damaged: {column} {first}:{last} can't be read: "
                f"{_first_line(error)}"
            ) from None
        return rows

    def _dataset(self, column: str) -> Any:
        key = (os.getpid(), column)
        if key not in self._datasets:
            self._datasets[key] = self.file()[f"steps/{column}"]
        return self._datasets[key]

    def final_observation(self, row: int) -> dict[str, NDArray[Any]]:
        """Return the leaves of the final observation in `row`."""
        leaves = leaf_datasets(self.file().get("final_observation"))
        return {name: dataset[row] for name, dataset in leaves.items()}

    def close(self) -> None:
        """Close this process's handle."""
        self._datasets.clear()
        file = self._files.pop(os.getpid(), None)
        if file is not None:
            file.close()


def writer_parts(writer: str) -> tuple[str, int, int]:
    """Return role, index and restart from a writer's folder name."""
    match = _WRITER.match(writer)
    if match is None:
        raise DataError(f"{writer} is not named ROLE-INDEX-RESTART, as a writer's folder is")
    return match["role"], int(match["index"]), int(match["restart"])


def leaf_datasets(group: Any) -> dict[str, Any]:
    """Return all datasets below an HDF5 group by their path in it."""
    found: dict[str, Any] = {}
    if group is not None:
        group.visititems(
            lambda name, item: found.update({name: item}) if hasattr(item, "dtype") else None
        )
    return found


def find_segments(trajectories: Path) -> list[Path]:
    """Return the files of all segments, closed and open, in order of writing."""
    return sorted(p for p in trajectories.glob("*-*-*/seg-*.h5*") if _NAME.search(p.name))


def load_segment(path: Path) -> Segment:
    """Read what describes a segment, and its episode index.

    Raises:
      DataError: it is damaged, or of another format or schema version.
    """
    match = _NAME.search(path.name)
    if match is None:
        raise DataError(f"{path} is not named seg-NUMBER.h5")
    try:
        file, readable = open_file(path)
    except OSError as error:
        raise DataError(f"{path} is damaged and can't be opened: {_first_line(error)}") from None
    try:
        path = Path(file.filename)
        return _describe(path, int(match[1]), file, readable and path.suffix == ".h5")
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {_first_line(error)}") from None
    finally:
        file.close()


def _describe(path: Path, number: int, file: h5py.File, finished: bool) -> Segment:
    attributes = dict(file.attrs)
    if attributes.get("format") != FORMAT:
        raise DataError(f"{path} is no segment of hpcrl trajectories: attribute format is missing")
    if attributes["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema version {attributes['schema_version']}, this analysis reads "
            f"version {SCHEMA_VERSION}: use the version of hpcrl that wrote it "
            f"({attributes.get('code_version', 'unknown')})"
        )
    steps = leaf_datasets(file["steps"])
    columns = {name: (data.shape[1:], data.dtype) for name, data in steps.items()}
    rows = min(len(data) for data in steps.values())
    entries = {name: data[:] for name, data in leaf_datasets(file["episodes"]).items()}
    count = min(len(values) for values in entries.values())
    ends = entries["start"][:count] + entries["length"][:count]
    whole = int(np.searchsorted(ends, rows, side="right"))
    num_steps = int(ends[whole - 1]) if whole else 0
    if finished and (whole < count or num_steps != rows):
        raise DataError(f"{path} is damaged: its index covers {num_steps} of {rows} steps")
    return Segment(
        path=path,
        writer=path.parent.name,
        number=number,
        attributes=attributes,
        env=json.loads(attributes["env"]),
        columns=columns,
        index={name: values[:whole] for name, values in entries.items()},
        num_steps=num_steps,
        finished=finished,
        unindexed_steps=rows - num_steps,
    )


def missing_numbers(paths: list[Path]) -> list[str]:
    """Return names of segments whose successors are there while they are not."""
    by_writer: dict[Path, set[int]] = {}
    for path in paths:
        match = _NAME.search(path.name)
        if match:
            by_writer.setdefault(path.parent, set()).add(int(match[1]))
    return [
        str(folder / f"seg-{number:05d}.h5")
        for folder, numbers in sorted(by_writer.items())
        for number in range(max(numbers))
        if number not in numbers
    ]


def missing_ends(segments: list[Segment]) -> list[str]:
    """Return what the last segments of writers say of segments after them that are not there."""
    last = {segment.writer: segment for segment in segments}
    return [
        f"{segment.path} is followed by another segment, which is missing, or its writer was "
        "killed before it began that one"
        for segment in last.values()
        if segment.finished and segment.end == "followed"
    ]


def missing_episodes(segments: list[Segment]) -> int:
    """Return how many selected episodes are absent though a later one of their environment is."""
    present: dict[tuple[str, int], set[int]] = {}
    fraction: dict[str, float] = {}
    for segment in segments:
        fraction[segment.writer] = float(segment.attributes["fraction"])
        pairs = zip(
            segment.index["env_id"].tolist(), segment.index["episode"].tolist(), strict=True
        )
        for env_id, episode in pairs:
            present.setdefault((segment.writer, env_id), set()).add(episode)
    return sum(
        number not in numbers and is_selected(env_id, number, fraction[writer])
        for (writer, env_id), numbers in present.items()
        for number in range(max(numbers))
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
