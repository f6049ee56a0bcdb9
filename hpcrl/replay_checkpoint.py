"""Where a replay's shards are kept between a run's stop and its next start.

    RUN/replay/step-000000001200/shard-0.replay          checkpoint.replay: shared
    $TMPDIR/hpcrl-<digest of RUN>/step-.../              checkpoint.replay: node_local

Each learner writes its own shard once the last checkpoint is durable and nothing arrives any
more, so nobody waits for it but the end of the job. A run that goes on from that checkpoint
spreads the unrolls of all files that a learner can reach evenly over those learners.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from hpcrl.human import format_bytes
from hpcrl.job import Seat
from hpcrl.replay.files import load_shards, save_shard
from hpcrl.replay.storage import ReplayShard


class ReplayCheckpoint:
    """One learner's access to the shard files of a run."""

    def __init__(self, seat: Seat):
        self._kind = seat.config.checkpoint.replay
        self._label = seat.link.label
        self._index = seat.role_index
        topology = seat.topology
        learners = topology.learner_ranks
        self._folder = seat.run_dir / "replay"
        if self._kind == "node_local":
            digest = hashlib.sha256(str(seat.run_dir.resolve()).encode()).hexdigest()[:16]
            self._folder = Path(tempfile.gettempdir()) / f"hpcrl-{digest}"
            node = topology.node_of[seat.rank]
            learners = tuple(rank for rank in learners if topology.node_of[rank] == node)
        self._place, self._places = list(learners).index(seat.rank), len(learners)

    def _step_folder(self, learner_steps: int) -> Path:
        return self._folder / f"step-{learner_steps:012d}"

    def save(self, shard: ReplayShard, learner_steps: int) -> None:
        """Write the shard that belongs to a checkpoint; say why if it can't be written."""
        if self._kind == "none":
            return
        path = self._step_folder(learner_steps) / f"shard-{self._index}.replay"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size = save_shard(shard, path)
        except OSError as error:
            self._say(f"replay shard {path} was not saved: {error.strerror or error}")
            return
        self._say(f"saved {shard.num_unrolls:,} unrolls ({format_bytes(size)}) to {path}")

    def restore(self, shard: ReplayShard, learner_steps: int) -> None:
        """Fill a fresh shard with this learner's part of what was saved with a checkpoint."""
        paths = sorted(self._step_folder(learner_steps).glob("shard-*.replay"))
        if self._kind == "none" or not paths:
            return

        def keep(stream_id: int) -> bool:
            return stream_id % self._places == self._place

        report = load_shards(paths, shard, keep if self._places > 1 or len(paths) > 1 else None)
        self._say(
            f"restored {report.restored_unrolls:,} unrolls, {report.items:,} items, from "
            f"{len(paths)} replay shards; {report.other_unrolls:,} unrolls belong to other "
            f"learners, {report.evicted_unrolls:,} found no room"
        )
        for error in report.errors:
            self._say(f"replay: {error}")

    def prune(self, learner_steps: int) -> None:
        """Remove the shards of other checkpoints, once all learners have saved theirs."""
        newest = self._step_folder(learner_steps)
        if self._kind != "none" and newest.is_dir():
            for folder in self._folder.glob("step-*"):
                if folder != newest:
                    shutil.rmtree(folder, ignore_errors=True)

    def _say(self, text: str) -> None:
        print(f"{self._label}: {text}", flush=True)
