"""Records while training goes on: a builder in the acting thread, a writer in its own."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcrl.config.load import config_hash, to_yaml
from hpcrl.config.root import Config
from hpcrl.config.sections import RecordingConfig
from hpcrl.durable import json_text, reason
from hpcrl.job import Job
from hpcrl.recording.episodes import Array, Budget, Episode, EpisodeBuilder, column_specs
from hpcrl.recording.segment import FLUSH_S, End, SegmentWriter, existing_segments, reserve_bytes
from hpcrl.run.rank_log import log
from hpcrl.run.run_dir import RunDir
from hpcrl.specs import ArraySpec, EnvSpec, unpack_bits

Steps = Mapping[str, Sequence[Array]]
"""Columns in pieces `[n, ...]`."""


class Recorder:
    """Takes rows and writes the episodes that they make up.

    An episode for which there is no memory, or no room on disk, is dropped whole and counted. With
    `waits` memory is never the reason.

    Args:
      folder: of this writer's segments; created here.
      config: the section.
      env: the environment's spec.
      behaviour: what acting records per row.
      env_seeds: seed of every environment's first episode by its global id, in row order.
      attributes: what else describes the recording.
      max_bytes: on disk, for this writer from now on.
      evaluation: global ids of the environments that nothing is learned from.
      waits: running episodes take the memory that they need, and one that has ended holds the
        caller up until the writer has taken the one before. Else nothing is ever held up.

    Attributes:
      recorded: episodes on disk or on their way there, without those that an error lost.
      stopped: why recording ended before `close`, "" where it did not.
    """

    def __init__(
        self,
        folder: Path,
        config: RecordingConfig,
        env: EnvSpec,
        behaviour: Mapping[str, ArraySpec],
        env_seeds: Mapping[int, int],
        attributes: Mapping[str, str | int | float],
        max_bytes: int,
        evaluation: Collection[int] = (),
        waits: bool = False,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = config
        self._columns = column_specs(env.unpacked(), behaviour, config.fields)
        self._bits = {path: leaf.bits for path, leaf in env.observation.items() if leaf.bits}
        self._env_seeds = env_seeds
        self._evaluation = frozenset(evaluation)
        self._attributes = {**attributes, "env": json_text(env.unpacked().to_json())}
        self._budget = Budget(sys.maxsize if waits else config.buffer_bytes)
        ids = np.array(list(env_seeds), np.int64)
        acted = column_specs(env, behaviour, config.fields)
        self._builder = EpisodeBuilder(ids, acted, config.fraction, self._budget)
        self._room_bytes = max_bytes
        self._next_segment = len(existing_segments(folder))
        self._segment: SegmentWriter | None = None
        self._segment_ends_s = 0.0
        self._versions = [-1, -1]
        self._closed_bytes = 0
        self._closed_episodes = 0
        self._open_bytes = 0
        self._unwritten = 0
        self.stopped = ""
        self.recorded = 0
        self._queue: queue.Queue[Episode | None] = queue.Queue(maxsize=1 if waits else 0)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Episodes that were selected and are not on disk, nor will be."""
        return self._builder.dropped + self._unwritten

    @property
    def nbytes(self) -> int:
        """Bytes written by this recorder."""
        return self._closed_bytes + self._open_bytes

    def totals(self) -> dict[str, float]:
        """Return what the metrics show of this recorder."""
        return {
            "recorded_episodes": self.recorded,
            "dropped_episodes": self.dropped,
            "recorded_bytes": self.nbytes,
        }

    def add(self, ids: npt.NDArray[np.intp], rows: Mapping[str, Array]) -> None:
        """Take one row of each of `ids`; `rows` are the fields of `wire.row_fields`."""
        for episode in self._builder.add(ids, rows):
            self._queue.put(episode)

    def replace(self, ids: npt.NDArray[np.intp], rows: Mapping[str, Array]) -> None:
        """Take these in place of the last rows of `ids`: another action was chosen."""
        self._builder.replace(ids, rows)

    def end(self, row: int, reward: float, final: Mapping[str, Array] | None) -> None:
        """End the running episode of `row`, which is not played on; see `EpisodeBuilder.end`."""
        episode = self._builder.end(row, reward, final)
        if episode is not None:
            self._queue.put(episode)

    def close(self) -> None:
        """Record the running episodes as interrupted, write all, close the segment."""
        for episode in self._builder.finish():
            self._queue.put(episode)
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                episode = self._queue.get(timeout=FLUSH_S)
            except queue.Empty:
                if self._segment and not self.stopped:
                    self._attempt(self._segment.flush_when_due)
                continue
            if episode is None:
                break
            if not self.stopped:
                self._attempt(partial(self._write, episode))
            if self.stopped:
                self._unwritten += 1
            self._budget.give(episode.nbytes)
        if not self.stopped:
            self._attempt(partial(self._close_segment, "finished"))

    def _attempt(self, act: Callable[[], None]) -> None:
        """Recording ends at the first error; acting doesn't."""
        try:
            act()
        except Exception as error:  # h5py raises many kinds; who waits must never wait for ever
            lost = self._abandon_segment()
            self._stop(
                f"can't write in {self._folder} ({reason(error)}); {lost} episodes that waited to "
                "be written are lost"
            )

    def _abandon_segment(self) -> int:
        """Give up what isn't flushed; return how many episodes of those recorded that is."""
        on_disk = self._closed_episodes
        if self._segment:
            on_disk += self._segment.flushed_episodes
            self._segment.abandon()
        lost = self.recorded - on_disk
        self.recorded -= lost
        self._unwritten += lost
        return lost

    def _stop(self, why: str) -> None:
        self.stopped = why
        log.warning("recording has ended, acting goes on: %s", why)

    def _write(self, episode: Episode) -> None:
        steps = episode.steps(self._columns)
        for path, bits in self._bits.items():
            if (name := f"observation/{path}") in steps:
                steps[name] = [unpack_bits(piece, bits) for piece in steps[name]]
        if self._room_bytes and self._most_bytes(steps) > self._room_bytes:
            self._close_segment("max_bytes")
            self._stop(f"recording.max_bytes is reached in {self._folder}")
            return
        full = self._open_bytes >= self._config.segment_bytes
        if full or time.monotonic() > self._segment_ends_s:
            self._close_segment("followed")
        segment = self._segment or self._open_segment()
        final = episode.final_observation()
        if final is not None:
            flags = {p: unpack_bits(final[p], bits) for p, bits in self._bits.items() if p in final}
            final |= flags
        segment.append(steps, final, self._entry(episode, steps))
        self.recorded += 1
        self._open_bytes = segment.nbytes

    def _most_bytes(self, steps: Steps) -> int:
        """Bytes on disk with one more episode, if nothing could be compressed."""
        pending = self._segment.pending_bytes if self._segment else 0
        more = sum(piece.nbytes for pieces in steps.values() for piece in pieces)
        return self.nbytes + pending + more + reserve_bytes(self._columns)

    def _entry(self, episode: Episode, steps: Steps) -> dict[str, Any]:
        versions = np.concatenate(steps.get("policy_version", [np.array([-1])]))
        first, last = int(versions.min()), int(versions.max())
        self._versions = [
            first if self._versions[0] < 0 else min(self._versions[0], first),
            max(self._versions[1], last),
        ]
        return {
            "return": np.concatenate(steps["reward"]).sum(dtype=np.float64),
            "env_id": episode.env_id,
            "episode": episode.number,
            "env_seed": self._env_seeds[episode.env_id],
            "evaluation": episode.env_id in self._evaluation,
            "complete": episode.ending != "interrupted",
            "terminated": episode.ending == "terminated",
            "truncated": episode.ending == "truncated",
            "first_policy_version": first,
            "last_policy_version": last,
            "end_unix_s": episode.end_unix_s,
        }

    def _open_segment(self) -> SegmentWriter:
        path = self._folder / f"seg-{self._next_segment:05d}.h5"
        attributes = {
            **self._attributes,
            "segment": self._next_segment,
            "created_unix_s": time.time(),
        }
        self._segment = SegmentWriter(path, self._columns, attributes, self._config.compression)
        self._segment_ends_s = time.monotonic() + self._config.segment_s
        self._next_segment += 1
        return self._segment

    def _close_segment(self, end: End) -> None:
        if self._segment is None:
            return
        first, last = self._versions
        self._segment.close(
            end,
            {
                "first_policy_version": first,
                "last_policy_version": last,
                "dropped_episodes": self.dropped,
                "closed_unix_s": time.time(),
            },
        )
        self._closed_bytes += self._segment.path.stat().st_size
        self._closed_episodes = self.recorded
        self._segment, self._versions, self._open_bytes = None, [-1, -1], 0


def describe(
    config: Config, role: str, index: int, restart: int, code_version: str
) -> dict[str, str | int | float]:
    """Return the root attributes that follow from the configuration and the code."""
    return {
        "code_version": code_version,
        "config": to_yaml(config),
        "config_hash": config_hash(config, ()),
        "env_name": config.env.name,
        "seed": config.run.seed,
        "role": role,
        "role_index": index,
        "restart": restart,
        "fraction": config.recording.fraction,
        "fields": json_text(list(config.recording.fields)),
        "compression": config.recording.compression,
    }


def open_recorder(
    job: Job, env_ids: npt.NDArray[np.int64], evaluation: npt.NDArray[np.bool_]
) -> Recorder | None:
    """Return the recorder of this rank, None where recording is off.

    All ranks that record share what earlier starts have left of `max_bytes` evenly.

    Args:
      job: the job.
      env_ids: `<int64>[N]` of the environments that this rank acts for, in row order.
      evaluation: `<bool>[N]`, whether nothing is learned from them.

    Raises:
      OSError: the folder can't be created.
    """
    config = job.config.recording
    if not config.enabled:
        return None
    role, index = job.topology.role_of[job.rank], job.role_index
    root = RunDir(job.run_dir).trajectories
    writers = sum(len(job.topology.ranks_of(r)) for r in ("inference", "worker", "evaluator"))
    left = config.max_bytes - job.recorded_bytes
    room = max(1, left // writers) if config.max_bytes else 0
    attributes = {
        **describe(job.config, role, index, job.restart, job.code_version),
        "rank": job.rank,
        "topology": json_text(job.topology.to_json()),
    }
    seeds = {int(env_id): job.seed("env", int(env_id)) % 2**31 for env_id in env_ids}
    return Recorder(
        root / f"{role}-{index}-{job.restart}",
        config,
        job.env,
        job.behaviour,
        seeds,
        attributes,
        room,
        env_ids[evaluation].tolist(),
    )
