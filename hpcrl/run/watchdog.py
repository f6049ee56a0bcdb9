"""A thread with a clock of its own beside every rank's loop: heartbeat, stacks, end of a hang.

The thread runs while the loop is inside MPI, in a system call or in C code that gives up Python's
lock. Where the lock is held, the files of this rank go stale, which a watching rank sees, and
faulthandler, which needs no lock, writes the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from hpcrl.durable import reason
from hpcrl.run.heartbeat import DIED, LEFT, Beat, describe, read_beats
from hpcrl.run.node_table import NodeTable
from hpcrl.run.rank_log import log
from hpcrl.run.run_dir import RunDirError
from hpcrl.run.slowness import Slow, WorkRate, slow_ranks
from hpcrl.run.stacks import answer_request, newest_request, request_stacks, stacks_folder
from hpcrl.timing import Pulse

_LONGEST_TICK_S = 5.0
_TICKS_PER_TIMEOUT = 20
_ANSWER_TICKS = 6
"""Until all have answered: a tick each for the node's writer and the rank, and the time in which
another one becomes the writer."""

_FRESH_TICKS = 4
_GATHER_S = 0.25
"""How soon to look again while ranks of the node are still to come, so that all are known soon."""


def tick_s(timeout_s: float) -> float:
    """Return how often a rank looks at its loop, with 0 for no timeout."""
    return min(_LONGEST_TICK_S, timeout_s / _TICKS_PER_TIMEOUT) if timeout_s else _LONGEST_TICK_S


class Silence:
    """Decides, by the clock of the one that watches, whose loop has stood still for too long.

    Only changes count, so clocks of other nodes don't matter. After a gap of half the time (it was
    stopped itself, or its file system was) it gives everyone the whole time again.

    Args:
      timeout_s: longest time without a beat.
      start_timeout_s: the same while a rank starts.
    """

    def __init__(self, timeout_s: float, start_timeout_s: float):
        self._timeout_s = timeout_s
        self._start_timeout_s = max(timeout_s, start_timeout_s)
        self._longest_gap_s = timeout_s / 2
        self._changed: dict[int, tuple[int, float]] = {}
        self._last_s: float | None = None

    def look(self, beats: Sequence[Beat], now_s: float) -> list[Beat]:
        """Return the beats of those that are silent for too long at monotonic time `now_s`."""
        if self._last_s is not None and now_s - self._last_s > self._longest_gap_s:
            self._changed.clear()
        self._last_s = now_s
        late = []
        for beat in beats:
            seen = self._changed.get(beat.rank)
            if seen is None or seen[0] != beat.beats:
                self._changed[beat.rank] = beat.beats, now_s
                continue
            limit_s = self._start_timeout_s if beat.stage == "start" else self._timeout_s
            if now_s - seen[1] > limit_s and beat.stage not in (LEFT, DIED):
                late.append(beat)
        return late


class Watchdog:
    """Writes this rank's heartbeat, answers requests for stacks and, on some ranks, watches all.

    Args:
      pulse: beaten by the loop.
      beat: this rank's record, but for what changes.
      run_dir: the run directory.
      table: what the ranks of this node share.
      silence: on a rank that watches the others, else None.
      timeout_s: longest time without a beat; 0: nobody ends the job.
      end_job: called in the thread with the reason, once; must not return.
      lost_ranks: ranks that this one has seen die; grows.
      finds_slow: whether this rank looks for slow ones.
    """

    def __init__(
        self,
        pulse: Pulse,
        beat: Beat,
        run_dir: Path,
        table: NodeTable,
        silence: Silence | None,
        timeout_s: float,
        end_job: Callable[[str], None],
        lost_ranks: AbstractSet[int] = frozenset(),
        finds_slow: bool = False,
    ):
        self._slow: list[Slow] = []
        self._finds_slow = finds_slow
        self._work = WorkRate()
        self._lost_ranks = lost_ranks
        self._pulse = pulse
        self._beat = beat._replace(beat_unix_s=time.time())
        self._run_dir = run_dir
        self._table = table
        self._held = run_dir / "logs" / f"held-rank-{beat.rank:05d}.txt"
        self._held_file = self._held.open("w")
        self._silence = silence
        self._timeout_s = timeout_s
        self._end_job = end_job
        self._request = newest_request(run_dir)
        self._answered_s = -float("inf")
        self._verdict_s: float | None = None
        self._complained = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def slow_ranks(self) -> Sequence[Slow]:
        """The slow ranks of the job, as of the last look; on a rank that looks for them."""
        return self._slow

    def stop(self) -> None:
        """End the thread and say that this rank has ended normally."""
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            self._table.leave(self._beat)
        self._table.close()
        with contextlib.suppress(OSError):
            self._held_file.close()
            self._held.unlink()

    def _run(self) -> None:
        while True:
            complete = self._table.complete
            written = self._write()
            if self._timeout_s:
                # Only reached while Python's lock can be had; else it goes off.
                faulthandler.dump_traceback_later(self._timeout_s, file=self._held_file)
            self._answer()
            if written and (self._silence is not None or self._finds_slow):
                self._look_at_all()
            if self._stop.wait(
                self._beat.tick_s if complete else min(self._beat.tick_s, _GATHER_S)
            ):
                return

    def _write(self) -> bool:
        """Give the heartbeat; say whether the file system takes those of this node."""
        beats, stage = self._pulse.beats, self._pulse.stage
        if beats != self._beat.beats:
            self._beat = self._beat._replace(beats=beats, stage=stage, beat_unix_s=time.time())
        work_s, share = self._work.look(self._pulse, time.monotonic())
        self._beat = self._beat._replace(work_s=work_s, work_share=share)
        self._table.put(self._beat, tuple(self._lost_ranks))
        try:
            self._table.write_if_due(self._beat)
        except OSError as error:
            if not self._complained:
                log.warning("can't write the heartbeat (%s)", reason(error))
            self._complained = True
            return False
        self._complained = False
        return self._table.age_s < _FRESH_TICKS * self._beat.tick_s

    def _answer(self) -> None:
        name = self._table.request
        if not name or name == self._request:
            return
        self._request, self._answered_s = name, time.monotonic()
        beat = self._beat
        header = f"{beat.name} (rank {beat.rank}, {beat.host}, pid {beat.pid})"
        try:
            answer_request(self._run_dir, name, beat.rank, header)
        except OSError as error:
            log.warning("can't write stacks (%s)", reason(error))

    def _look_at_all(self) -> None:
        beats = read_beats(self._run_dir, self._beat.restart)
        if self._finds_slow:
            self._slow = slow_ranks(beats)
        if self._silence is not None:
            self._judge(self._silence, beats)

    def _judge(self, silence: Silence, beats: Sequence[Beat]) -> None:
        """Ask for stacks when someone is silent, and end the job when they had time to come."""
        now_s = time.monotonic()
        late = silence.look(beats, now_s)
        if not late:
            self._verdict_s = None
        elif self._verdict_s is None:
            self._verdict_s = now_s + _ANSWER_TICKS * self._beat.tick_s
            if now_s - self._answered_s > _ANSWER_TICKS * self._beat.tick_s:  # not asked by another
                with contextlib.suppress(RunDirError):
                    request_stacks(self._run_dir)
        elif now_s >= self._verdict_s:
            who = "; ".join(describe(beat, time.time()) for beat in late)
            self._end_job(f"{who}: the job ends; stacks are in {stacks_folder(self._run_dir)}")
