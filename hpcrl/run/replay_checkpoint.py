"""Where a replay's shards are kept, and which files of them belong together.

    RUN/replay/step-000000001200.json                    a whole set: where it is, how many shards
    RUN/replay/step-000000001200/shard-0.replay          checkpoint.replay: shared
    $TMPDIR/hpcrl-<digest of RUN>/step-.../              checkpoint.replay: node_local

At a checkpoint every learner begins to write its shard beside training. Once all have finished
and the checkpoint is durable the root writes the set's record; once that is durable the set
before is removed. So there is one whole set at any time, whatever is killed when, and a file
without a record is the rest of a killed writer. A run that goes on takes the newest set that
is not newer than its checkpoint: the replay may be a little older than the parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcrl.comm.agreement import Agreement, Rule
from hpcrl.comm.link import Group
from hpcrl.durable import atomic_write, json_text
from hpcrl.human import format_bytes
from hpcrl.job import Seat
from hpcrl.replay.background_write import BackgroundWrite
from hpcrl.replay.files import load_shards
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.shard_writer import record_dtype
from hpcrl.replay.storage import ReplayShard

_COPY_S = 0.005
"""Longest copy at a time: about what a message may wait for anyway."""

RULES: Mapping[str, Rule] = {
    "replay_unwritten": "max",
    "replay_failed": "sum",
    "replay_unrolls": "sum",
}
"""What the learners agree on while a set is written."""


@dataclass(frozen=True)
class ShardSet:
    """The record of a whole set.

    Attributes:
      learner_steps: of the checkpoint that it was begun with.
      place: node_local or shared.
      shards: learners that wrote it.
      failed: of these, how many could not.
      unrolls: in all files together.
    """

    learner_steps: int
    place: str
    shards: int
    failed: int
    unrolls: int


class ReplayCheckpoint:
    """One learner's access to the shard files of a run.

    Attributes:
      write_s: seconds that the last finished write took, beside training.
    """

    def __init__(self, seat: Seat):
        """Remove what killed writers left; nobody writes before all learners are here."""
        self._kind = seat.config.checkpoint.replay
        self._label = seat.link.label
        self._index = seat.role_index
        self._is_root = seat.rank == seat.root
        self._records = seat.run_dir / "replay"
        topology = seat.topology
        learners = topology.learner_ranks
        self._num_shards = len(learners)
        node = topology.node_of[seat.rank]
        self._on_node = [rank for rank in learners if topology.node_of[rank] == node]
        self._learners, self._rank = list(learners), seat.rank
        digest = hashlib.sha256(str(seat.run_dir.resolve()).encode()).hexdigest()[:16]
        self._local_folder = Path(tempfile.gettempdir()) / f"hpcrl-{digest}"
        self._folder = self._folder_of(self._kind)
        self._write: BackgroundWrite | None = None
        self._steps = 0
        self._recorded = False
        self._kept_steps = -1
        self.write_s = 0.0
        if self._kind != "none":
            self._remove_all_but([shard_set.learner_steps for shard_set in self._sets()])

    def _folder_of(self, place: str) -> Path:
        return self._local_folder if place == "node_local" else self._records

    def _step_folder(self, learner_steps: int) -> Path:
        return self._folder / _step_name(learner_steps)

    def _sharers(self, place: str) -> list[int]:
        """Learners that see the same files."""
        return self._on_node if place == "node_local" else self._learners

    def check_space(self, layout: ReplayLayout, capacity_unrolls: int, compression: str) -> None:
        """Say when a full shard, written while the one before is kept, may not fit."""
        if self._kind == "none" or compression != "none":
            return
        needed = 2 * len(self._sharers(self._kind)) * capacity_unrolls
        needed *= record_dtype(layout).itemsize
        free = shutil.disk_usage(_existing(self._folder)).free
        if needed > free:
            self._say(
                f"checkpoint.replay {self._kind}: two sets of full shards take "
                f"{format_bytes(needed)} in {self._folder}, {format_bytes(free)} are free; a "
                "shard that finds no room is not kept (replay.compression makes them smaller)"
            )

    def begin(self, shard: ReplayShard, learner_steps: int) -> None:
        """Begin to write the set of a checkpoint, unless the one before is still being written.

        All learners call it at the same learner step.
        """
        if self._kind != "none" and self._write is None:
            path = self._step_folder(learner_steps) / f"shard-{self._index}.replay"
            self._write = BackgroundWrite(shard, path)
            self._steps, self._recorded = learner_steps, False

    def serve(self) -> None:
        """Copy the next part, if a set is being written."""
        if self._write is not None:
            self._write.feed(_COPY_S)

    def vote(self) -> dict[str, float]:
        """Return this learner's numbers for `RULES`."""
        write = self._write
        if write is None or not write.finished:
            unwritten = 0.0 if write is None else 1.0
            return {"replay_unwritten": unwritten, "replay_failed": 0.0, "replay_unrolls": 0.0}
        failed = write.error is not None
        return {
            "replay_unwritten": 0.0,
            "replay_failed": float(failed),
            "replay_unrolls": 0.0 if failed else float(write.num_unrolls),
        }

    def agree(self, agreed: Mapping[str, float], checkpoint_durable: bool) -> None:
        """Act on the outcome of a vote: record a set that is whole, then remove older ones.

        Args:
          agreed: the outcome for `RULES`.
          checkpoint_durable: whether the checkpoint of the set is; agreed, too.
        """
        write = self._write
        if write is None:
            return
        if self._recorded:
            # The root cast the vote after it had written the record.
            self._write, self._kept_steps = None, self._steps
            if self._is_root:
                with contextlib.suppress(OSError):  # what stays is removed after the next set
                    for path in self._records.glob("step-*.json"):
                        if path.stem != _step_name(self._steps):
                            path.unlink(missing_ok=True)
            self._remove_all_but([self._steps])
            return
        if agreed["replay_unwritten"] or not checkpoint_durable:
            return
        self._tell(write)
        failed = int(agreed["replay_failed"])
        if failed == self._num_shards:
            self._write = None  # the set before stays
            return
        if self._is_root:
            self._record(
                ShardSet(
                    self._steps,
                    self._kind,
                    self._num_shards,
                    failed,
                    int(agreed["replay_unrolls"]),
                )
            )
        self._recorded = True

    def _record(self, shard_set: ShardSet) -> None:
        path = self._records / f"{_step_name(shard_set.learner_steps)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json_text(asdict(shard_set), indent=2) + "\n")

    def _tell(self, write: BackgroundWrite) -> None:
        self.write_s = write.write_s
        where = self._step_folder(self._steps)
        if write.error is not None:
            self._say(f"replay shard in {where} was not saved: {write.error}")
            return
        missed = f"; {write.missed_unrolls:,} were given up before" if write.missed_unrolls else ""
        self._say(
            f"saved {write.num_unrolls:,} unrolls ({format_bytes(write.num_bytes)}) of learner "
            f"step {self._steps} in {where}{missed}"
        )

    def save(self, shard: ReplayShard, learner_steps: int, group: Group) -> None:
        """Write the set of the last checkpoint and wait for it; all learners call it."""
        if self._kind == "none" or self._kept_steps == learner_steps:
            return
        if self._write is not None and not (self._recorded and self._steps == learner_steps):
            self._write.cancel()
            self._write = None
        self.begin(shard, learner_steps)
        if self._write is not None:
            self._write.wait()
        votes = Agreement(group, RULES)
        while self._write is not None:
            self.agree(votes.vote(self.vote()), checkpoint_durable=True)

    def find(self, learner_steps: int) -> ShardSet | None:
        """Return the newest whole set up to a checkpoint, None if there is none; on the root.

        Records of later sets are removed: they belong to a future that does not come.
        """
        best = None
        for shard_set in self._sets():
            if shard_set.learner_steps > learner_steps:
                name = _step_name(shard_set.learner_steps)
                (self._records / f"{name}.json").unlink(missing_ok=True)
                self._say(f"replay set {name} is newer than the checkpoint and is not used")
            elif best is None or shard_set.learner_steps > best.learner_steps:
                best = shard_set
        return None if self._kind == "none" else best

    def _sets(self) -> list[ShardSet]:
        found = []
        for path in sorted(self._records.glob("step-*.json")):
            try:
                found.append(ShardSet(**json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError) as error:
                self._say(f"replay set {path} can't be read: {error}")
        return found

    def restore(self, shard: ReplayShard, shard_set: ShardSet) -> None:
        """Fill a fresh shard with this learner's part of a set, and say what that was.

        As many files as learners that see them: each takes one. Otherwise every learner reads
        all of them and keeps the streams that fall to it.
        """
        sharers = self._sharers(shard_set.place)
        place, places = sharers.index(self._rank), len(sharers)
        folder = self._folder_of(shard_set.place) / _step_name(shard_set.learner_steps)
        paths = [folder / f"shard-{index}.replay" for index in range(shard_set.shards)]
        if shard_set.place == "node_local":
            paths = [path for path in paths if path.exists()]
        self._kept_steps = shard_set.learner_steps
        one_each = len(paths) == places
        mine = [paths[place]] if one_each else paths

        def keep(stream_id: int) -> bool:
            return stream_id % places == place

        report = load_shards(mine, shard, None if one_each or places == 1 else keep)
        what = f"its own of {shard_set.shards}" if one_each and places > 1 else f"{len(mine)}"
        self._say(
            f"restored {report.restored_unrolls:,} unrolls, {report.items:,} items, from {what} "
            f"replay shards of learner step {shard_set.learner_steps}; {report.other_unrolls:,} "
            f"unrolls belong to other learners, {report.evicted_unrolls:,} found no room"
        )
        if not paths:
            self._say(
                f"none of the {shard_set.shards} shards ({shard_set.place}) is in {folder}: this "
                "learner fills its replay again"
            )
        for error in report.errors:
            self._say(f"replay: {error}")

    def _remove_all_but(self, steps: Sequence[int]) -> None:
        """Remove files of other sets; one learner of those that see them."""
        if self._rank == self._sharers(self._kind)[0]:
            kept = {_step_name(step) for step in steps}
            with contextlib.suppress(OSError):
                for folder in self._folder.glob("step-*"):
                    if folder.is_dir() and folder.name not in kept:
                        shutil.rmtree(folder, ignore_errors=True)

    def _say(self, text: str) -> None:
        print(f"{self._label}: {text}", flush=True)


def _step_name(learner_steps: int) -> str:
    return f"step-{learner_steps:012d}"


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())
