"""Why and when a run stops: its goal is reached, a signal came, or the deadline is near."""

from __future__ import annotations

import signal
import time
from enum import IntEnum
from types import FrameType
from typing import NamedTuple

from hpcrl import exit_codes
from hpcrl.config.sections import StopConfig
from hpcrl.run.counters import Counters, RollingReturns


class Stop(IntEnum):
    """A learner's vote; the greatest wins, so that a finished run is never requeued."""

    NO = 0
    REQUEUE = 1
    GOAL = 2


class Outcome(NamedTuple):
    """How training ended: the agreed vote and, on the root, the reason in words."""

    stop: Stop
    reason: str

    @property
    def exit_code(self) -> int:
        """0 when the goal was reached, 75 to be started again."""
        return exit_codes.DONE if self.stop is Stop.GOAL else exit_codes.REQUEUE

    @property
    def state(self) -> str:
        """What STATUS.json says of the run."""
        return "done" if self.stop is Stop.GOAL else "requeue"


class StopSignal:
    """Set by SIGTERM, SIGUSR2 or SIGINT, or when the deadline is near.

    The handlers only set a flag; learners vote on it between steps. Every rank installs
    them, so that a signal sent to all ranks kills none of them.

    Args:
      stop_at_unix_s: when to begin the agreed stop; None: never.
    """

    def __init__(self, stop_at_unix_s: float | None = None):
        self.stop_at_unix_s = stop_at_unix_s
        self._signal: int | None = None

    def install(self) -> None:
        """Replace the handlers of this process."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """At the end of the run: a request to stop that still comes must not kill the process.

        Python gives its handlers back while it ends, and the signal's default is death.
        """
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    @property
    def reason(self) -> str | None:
        """Why the run should stop and be requeued; None to go on."""
        if self._signal is not None:
            return f"signal {signal.Signals(self._signal).name}"
        if self.stop_at_unix_s is not None and time.time() >= self.stop_at_unix_s:
            return "the deadline is near"
        return None


def lead_problem(lead_s: float, checkpoint_write_s: float) -> str | None:
    """Return why the stop would begin too late for its checkpoint; None when there is time.

    The rule: twice the last checkpoint's time, as file systems are slowest when many jobs end,
    and a minute for the drain and for Slurm's clock.
    """
    needed_s = 2 * checkpoint_write_s + 60.0
    if lead_s >= needed_s:
        return None
    return (
        f"run.deadline_lead_s {lead_s:g} is short: the last checkpoint took "
        f"{checkpoint_write_s:.1f} s to write; give at least {needed_s:.0f} (and as much to "
        "sbatch's --signal), or the job may be killed before its last checkpoint is durable"
    )


def goal_reached(
    stop: StopConfig, counters: Counters, returns: RollingReturns | None
) -> str | None:
    """Return the stop condition that holds, None when none does.

    `returns` is None on learners that don't see the episodes.
    """
    for name in ("frames", "agent_steps", "wall_time_s"):
        limit, reached = getattr(stop, name), getattr(counters, name)
        if limit and reached >= limit:
            return f"stop.{name} {limit:g} reached"
    if stop.mean_return is not None and returns is not None and returns.full:
        mean = returns.mean_return
        if mean is not None and mean >= stop.mean_return:
            return f"stop.mean_return {stop.mean_return:g} reached"
    return None
