"""A run as pandas frames and lazy arrays, for scripts and notebooks.

    run = Run("runs/breakout")
    run.metrics()                    # one row per report, as training wrote them
    run.episodes()                   # one row per recorded episode
    run.steps("reward")[1000:2000]   # read when indexed
    run.episode(17)["observation/obs"]

Reads finished, running and partly copied runs. What is damaged or still being written is an
error unless `partial` is true; then it is left out, or read up to its last flush, and `notes`
says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from analysis.errors import DataError
from analysis.segments import (
    Segment,
    find_segments,
    load_segment,
    missing_ends,
    missing_episodes,
    missing_numbers,
)


class LazyColumn:
    """One step column over all segments, read as it is indexed.

    Attributes:
      shape: `[S, ...]`, S steps of all episodes.
      dtype: numpy dtype.
    """

    def __init__(self, name: str, segments: Sequence[Segment]):
        self._name = name
        self._segments = segments
        self._ends = np.cumsum([segment.num_steps for segment in segments])
        shape, self.dtype = segments[0].columns[name]
        self.shape = (int(self._ends[-1]), *shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> NDArray[Any]:
        if not isinstance(key, slice):
            row = range(len(self))[key]
            return self[row : row + 1][0]
        first, last, stride = key.indices(len(self))
        if stride < 0:
            raise ValueError(f"column {self._name}: a step of {stride} is not supported, use 1 up")
        parts = [part for _, part in self._parts(first, last)]
        if len(parts) == 1:
            return parts[0][::stride]
        rows = np.concatenate(parts) if parts else np.zeros((0, *self.shape[1:]), self.dtype)
        return rows[::stride]

    def chunks(self, rows: int = 65536) -> Iterator[NDArray[Any]]:
        """Yield the whole column in pieces of at most `rows`, in constant memory."""
        for first in range(0, len(self), rows):
            yield self[first : min(first + rows, len(self))]

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, NDArray[Any]]]:
        number = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            segment = self._segments[number]
            begin = int(self._ends[number]) - segment.num_steps
            stop = min(last, int(self._ends[number]))
            if stop > first:
                yield first, segment.read(self._name, first - begin, stop - begin)
            first, number = max(first, stop), number + 1


class Run:
    """One run directory.

    Args:
      path: of the directory.
      partial: use what can be read of damaged or unfinished recordings.

    Attributes:
      notes: what the reader should know: files left out, episodes lost.

    Raises:
      DataError: there is no such directory, or nothing of a run in it.
    """

    def __init__(self, path: str | Path, partial: bool = False):
        self.path = Path(path)
        self.partial = partial
        self.notes: list[str] = []
        if not self.path.is_dir():
            raise DataError(f"{self.path} is no directory")
        wanted = ("STATUS.json", "metrics.jsonl", "trajectories")
        if not any((self.path / name).exists() for name in wanted):
            raise DataError(
                f"{self.path} is not a run directory, or an empty one: none of "
                f"{', '.join(wanted)} is in it"
            )

    @property
    def name(self) -> str:
        """Last part of the path, for labels."""
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml; from the recording where that file is missing, else empty."""
        path = self.path / "config.yaml"
        if path.exists():
            text = path.read_text(encoding="utf-8")
        elif find_segments(self.path / "trajectories"):
            text = str(self.segments[0].attributes["config"])
        else:
            return {}
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise DataError(f"{path} can't be read: {error}") from None
        return data if isinstance(data, dict) else {}

    @cached_property
    def status(self) -> dict[str, Any]:
        """STATUS.json, empty where there is none."""
        return self._json("STATUS.json")

    @cached_property
    def topology(self) -> dict[str, Any]:
        """topology.json, empty where there is none."""
        return self._json("topology.json")

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DataError(f"{path} can't be read: {error}") from None
        return data if isinstance(data, dict) else {}

    @property
    def env_name(self) -> str:
        """Full name of the environment, "" where nothing tells it."""
        return str(self.config.get("env", {}).get("name", ""))

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return max(1, len(self.topology.get("nodes", [])))

    def metrics(self) -> pd.DataFrame:
        """Return one row per record of metrics.jsonl; a last line that was cut is passed over.

        Raises:
          DataError: the file is missing or holds no record, or another line is none.
        """
        path = self.path / "metrics.jsonl"
        if not path.exists():
            raise DataError(f"{path} is missing: the run has reported nothing, or was not copied")
        lines = [line for line in path.read_bytes().split(b"\n") if line]
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except ValueError:
                if number < len(lines):
                    raise DataError(f"{path}: line {number} is no JSON object") from None
        if not records:
            raise DataError(f"{path} holds no record yet")
        frame = pd.DataFrame(records)
        frame["node_hours"] = frame["wall_time_s"] * self.num_nodes / 3600
        return frame

    @property
    def is_recorded(self) -> bool:
        """Whether there are trajectories."""
        return bool(find_segments(self.path / "trajectories"))

    @cached_property
    def segments(self) -> list[Segment]:
        """All readable segments.

        Raises:
          DataError: there are none; or one is damaged, missing or not closed, and not `partial`.
        """
        folder = self.path / "trajectories"
        paths = find_segments(folder)
        if not paths:
            raise DataError(
                f"0 segments found in {folder}, looked for */seg-*.h5: train with "
                "--recording.enabled true"
            )
        problems = [f"{path} is missing" for path in missing_numbers(paths)]
        segments = []
        for path in paths:
            try:
                segment = load_segment(path)
            except DataError as error:
                problems.append(str(error))
                continue
            segments.append(segment)
            if not segment.finished:
                problems.append(
                    f"{path} is still being written or its writer was killed: "
                    f"{len(segment.index['start'])} whole episodes can be read, "
                    f"{segment.unindexed_steps} flushed steps of later episodes can't"
                )
        same_environment_in(segments)
        self._settle(problems + missing_ends(segments), segments)
        return segments

    def _settle(self, problems: list[str], segments: list[Segment]) -> None:
        if problems and not self.partial:
            raise DataError(
                "\n".join(problems) + "\n(--partial, or Run(..., partial=True), uses the rest)"
            )
        if not any(segment.num_steps for segment in segments):
            raise DataError("\n".join([*problems, f"{self.path}: no whole episode is recorded"]))
        self.notes += problems
        self.notes += [
            f"{segment.path} is the last of its writer, which had reached recording.max_bytes: "
            "what was played later is not in the recording"
            for segment in segments
            if segment.end == "max_bytes"
        ]
        absent = missing_episodes(segments)
        if absent:
            last = {s.writer: int(s.attributes.get("dropped_episodes", 0)) for s in segments}
            self.notes.append(
                f"{self.path}: {absent} episodes are not in the recording; "
                f"{sum(last.values())} were dropped while recording"
            )

    def episodes(self) -> pd.DataFrame:
        """Return one row per whole episode, in the order of `steps`.

        Columns: those of the index (return, length, env_id, episode, complete, terminated,
        truncated, evaluation, policy versions, ...), `start` counted over all segments, and
        writer, restart and run.

        Raises:
          DataError: as `segments`; or a return is NaN or infinite.
        """
        frames, offset = [], 0
        for segment in self.segments:
            frame = pd.DataFrame(segment.index)
            frame["start"] += offset
            _, _, frame["restart"] = segment.role_restart
            frame["writer"] = segment.writer
            frames.append(frame)
            offset += segment.num_steps
        episodes = pd.concat(frames, ignore_index=True)
        episodes["run"] = self.name
        bad = episodes.index[~np.isfinite(episodes["return"])]
        if len(bad):
            raise DataError(
                f"{self.path}: the rewards of {len(bad)} episodes (the first is number {bad[0]}) "
                "hold NaN or infinities; no statistic of them would mean anything"
            )
        return episodes

    def training_episodes(self) -> pd.DataFrame:
        """Return `episodes()` without those that only evaluate, unless there are no others.

        The frame's index still is their row in `episodes()`.

        Raises:
          DataError: as `episodes`.
        """
        episodes = self.episodes()
        training = episodes[~episodes["evaluation"]]
        return training if len(training) else episodes

    @property
    def columns(self) -> list[str]:
        """Names of the step columns."""
        return list(self.segments[0].columns)

    def steps(self, column: str) -> LazyColumn:
        """Return a step column over all segments, unread.

        Raises:
          DataError: it wasn't recorded.
        """
        if any(column not in segment.columns for segment in self.segments):
            raise DataError(
                f"{self.path}: column {column} was not recorded; there are "
                f"{', '.join(self.columns)}"
            )
        return LazyColumn(column, [segment for segment in self.segments if segment.num_steps])

    def episode(self, number: int, columns: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return the steps of one episode by its row in `episodes()`, `[T, ...]` by column.

        Its last observation, where there is one, is under `final/<leaf>`.

        Raises:
          DataError: there is no such episode or column.
        """
        first = 0
        for segment in self.segments:
            count = len(segment.index["start"])
            if first <= number < first + count:
                entry = {name: values[number - first] for name, values in segment.index.items()}
                return _read_episode(segment, entry, columns or self.columns)
            first += count
        raise DataError(f"{self.path}: there is no episode {number}; the last is {first - 1}")

    def image_leaf(self) -> str | None:
        """Return the step column of the first image leaf, None where no leaf is an image."""
        leaves = self.segments[0].env["observation"]
        for path, leaf in leaves.items():
            shape, column = leaf["array"]["shape"], f"observation/{path}"
            is_image = len(shape) == 2 or (len(shape) == 3 and shape[-1] == 3)
            is_image = is_image and leaf["kind"] == "box"
            if is_image and leaf["array"]["dtype"] == "uint8" and column in self.columns:
                return column
        return None

    def close(self) -> None:
        """Close the files; they are opened again when needed."""
        for segment in self.__dict__.get("segments", []):
            segment.close()


def _read_episode(
    segment: Segment, entry: dict[str, Any], columns: Sequence[str]
) -> dict[str, NDArray[Any]]:
    unknown = [column for column in columns if column not in segment.columns]
    if unknown:
        raise DataError(f"{segment.path}: no column {unknown[0]}")
    first, last = int(entry["start"]), int(entry["start"] + entry["length"])
    steps = {column: segment.read(column, first, last) for column in columns}
    if entry["final"] >= 0:
        final = segment.final_observation(int(entry["final"]))
        steps |= {f"final/{path}": value for path, value in final.items()}
    return steps


def same_environment_in(segments: Sequence[Segment]) -> None:
    """Raise DataError where the segments of a run are of different environments."""
    kinds = {
        (str(segment.attributes.get("env_name", "")), json.dumps(segment.env)): segment.path
        for segment in segments
    }
    if len(kinds) > 1:
        which = ", ".join(f"{name} in {path}" for (name, _), path in kinds.items())
        raise DataError(
            f"segments of different environments lie in one run and can't be read as one: {which}"
        )


def same_environment(runs: Sequence[Run]) -> str:
    """Return the environment that all `runs` share.

    Raises:
      DataError: they have different ones.
    """
    names = {run.env_name: run.path for run in runs}
    if len(names) > 1:
        which = ", ".join(f"{name} in {path}" for name, path in names.items())
        raise DataError(
            f"the runs have different environments, which can't be put together: {which}"
        )
    return next(iter(names))
