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
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.errors import DataError
from analysis.lazy_column import LazyColumn
from analysis.missing import missing_ends, missing_episodes, missing_numbers, missing_writers
from analysis.run_files import node_hours, parse_config, read_json, read_metrics, starts
from analysis.segments import (
    Segment,
    find_segments,
    joined_index,
    load_segment,
    segment_attributes,
    topology_in,
)


class Run:
    """One run directory.

    Args:
      path: of the directory.
      partial: use what can be read of damaged or unfinished recordings.
      name: for labels; the last part of the path if absent.

    Attributes:
      notes: what the reader should know: files left out, episodes lost.

    Raises:
      DataError: there is no such directory, or nothing of a run in it.
    """

    def __init__(self, path: str | Path, partial: bool = False, name: str = ""):
        self.path = Path(path)
        self.name = name or self.path.resolve().name
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

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml; where that is missing, as a segment that can be read has it, else empty.

        Raises:
          DataError: it is damaged.
        """
        path = self.path / "config.yaml"
        try:
            return parse_config(path, path.read_bytes())
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from None
        for source, attributes in self._recorded_attributes():
            if text := str(attributes.get("config", "")):
                return parse_config(source, text.encode())
        return {}

    @cached_property
    def status(self) -> dict[str, Any]:
        """STATUS.json, empty where there is none."""
        return read_json(self.path / "STATUS.json")

    @cached_property
    def topology(self) -> dict[str, Any]:
        """topology.json, that of the last start; empty where there is none."""
        return read_json(self.path / "topology.json")

    def _recorded_attributes(self) -> Iterable[tuple[Path, dict[str, Any]]]:
        """Yield the root attributes of those segments in which they can be read."""
        for path in find_segments(self.path / "trajectories"):
            try:
                yield path, segment_attributes(path)
            except DataError:
                continue

    @property
    def env_name(self) -> str:
        """Full name of the environment, "" where nothing tells it."""
        return str(self.config.get("env", {}).get("name", ""))

    @property
    def num_nodes(self) -> int:
        """Nodes of the job's last start."""
        return max(1, len(self.topology.get("nodes", [])))

    def metrics(self) -> pd.DataFrame:
        """Return one row per record of metrics.jsonl; a last line that was cut is passed over.

        `node_hours` counts the time of every start on the nodes that it had. A recording tells
        them, and topology.json those of the last start; a note says where neither does.

        Raises:
          DataError: the file is missing or holds no record, or another line is none.
        """
        frame = read_metrics(self.path / "metrics.jsonl")
        numbers = sorted(set(starts(frame).tolist()))
        nodes = {**(self._recorded_nodes if len(numbers) > 1 else {}), numbers[-1]: self.num_nodes}
        unknown = [str(number) for number in numbers if number not in nodes]
        if unknown:
            self._note(
                f"{self.path}: nothing tells how many nodes start {', '.join(unknown)} had: "
                f"node-hours count {self.num_nodes}, as the last start has"
            )
        frame["node_hours"] = node_hours(frame, nodes, self.num_nodes)
        return frame

    @cached_property
    def _recorded_nodes(self) -> dict[int, int]:
        """Nodes of each start by its number, as far as the recording tells."""
        found = {}
        for _, attributes in self._recorded_attributes():
            nodes = topology_in(attributes).get("nodes")
            if nodes and "restart" in attributes:
                found[int(attributes["restart"])] = len(nodes)
        return found

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

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
        self._refuse(problems + missing_ends(segments), segments)
        self.notes += self._absences(paths, segments)
        return segments

    def _refuse(self, problems: list[str], segments: list[Segment]) -> None:
        if problems and not self.partial:
            raise DataError(
                "\n".join(problems) + "\n(--partial, or Run(..., partial=True), uses the rest)"
            )
        if not any(segment.num_steps for segment in segments):
            raise DataError("\n".join([*problems, f"{self.path}: no whole episode is recorded"]))
        self.notes += problems

    def _absences(self, paths: list[Path], segments: list[Segment]) -> list[str]:
        notes = [
            f"{segment.path} is the last of its writer, which had reached recording.max_bytes: "
            "what was played later is not in the recording"
            for segment in segments
            if segment.end == "max_bytes"
        ]
        notes += [f"{self.path}: {text}" for text in missing_writers(paths, segments)]
        absent = missing_episodes(segments)
        dropped: dict[str, int] = {}
        for segment in segments:  # each counts those of its writer until it was closed
            until = int(segment.attributes.get("dropped_episodes", 0))
            dropped[segment.writer] = max(until, dropped.get(segment.writer, 0))
        if absent or any(dropped.values()):
            notes.append(
                f"{self.path}: {absent} episodes are not in the recording though later ones of "
                f"their environments are; {sum(dropped.values())} were dropped while recording"
            )
        return notes

    def episodes(self) -> pd.DataFrame:
        """Return one row per whole episode, in the order of `steps`.

        Columns: those of the index (return, length, env_id, episode, complete, terminated,
        truncated, evaluation, policy versions, ...), `start` counted over all segments, and
        writer, restart and run. An episode takes about 100 bytes of memory here, and as many
        in `segments`, which keep what they have read.

        Raises:
          DataError: as `segments`; or a return is NaN or infinite.
        """
        segments = self.segments
        counts = [len(segment.index["start"]) for segment in segments]
        columns: dict[str, Any] = joined_index(segments)
        columns["restart"] = np.repeat([segment.role_restart[2] for segment in segments], counts)
        columns["writer"] = _repeated([segment.writer for segment in segments], counts)
        columns["run"] = _repeated([self.name], [sum(counts)])
        episodes = pd.DataFrame(columns, copy=False)
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


def _repeated(names: list[str], counts: list[int]) -> pd.Categorical:
    """Return each name so many times, a small number each."""
    kinds = sorted(set(names))
    return pd.Categorical.from_codes(np.repeat([kinds.index(n) for n in names], counts), kinds)


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


def open_runs(paths: Sequence[Path], partial: bool = False) -> list[Run]:
    """Return runs whose names tell them apart: as much of the paths' ends as that takes.

    Raises:
      DataError: as `Run`.
    """
    parts = [path.resolve().parts for path in paths]
    count = 1
    while len({whole[-count:] for whole in parts}) < len(set(parts)):
        count += 1
    names = [str(Path(*whole[-count:])) for whole in parts]
    return [Run(path, partial, name) for path, name in zip(paths, names, strict=True)]
