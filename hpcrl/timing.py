"""Always-on stage timers and the one policy for waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

WaitPolicy = Literal["spin", "yield", "backoff"]

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 2e-3
_SLEEP_SHARE = 0.25
"""A backoff sleep lasts this share of the time waited so far, so it delays a wake-up by no
more than that share of the wait."""


class Pulse:
    """A loop's sign of life: it counts, and a thread with a clock of its own looks on.

    Attributes:
      beats: grows while the loop goes round, also while it waits for messages.
      stage: the stage that it finished last; `start` while the job starts.
      work_s: seconds that its own work took, which is no waiting.
      works: how often it was done.
    """

    __slots__ = ("beats", "stage", "work_s", "works")

    def __init__(self) -> None:
        self.beats = 0
        self.stage = "start"
        self.work_s = 0.0
        self.works = 0

    def beat(self, stage: str | None = None) -> None:
        """Give a sign of life outside of the loop's stages and waits."""
        self.beats += 1
        self.stage = stage or self.stage


class StageTimer:
    """Attributes elapsed time to named stages; one clock read and one addition per mark.

    The loop calls `mark("send")` at the END of a stage: all time since the previous mark
    belongs to it. `seconds` are totals since the start. Each mark beats `pulse`, and `work` is
    the stage whose duration tells a slow rank from others of its role.
    """

    def __init__(
        self,
        stages: tuple[str, ...],
        clock: Callable[[], float] = time.perf_counter,
        pulse: Pulse | None = None,
        work: str = "",
    ):
        self._work = work
        self.seconds: dict[str, float] = dict.fromkeys(stages, 0.0)
        self._clock = clock
        self._pulse = pulse or Pulse()
        self._last = clock()

    def mark(self, stage: str) -> None:
        """Add the time since the last mark to `stage`, which must be declared."""
        now = self._clock()
        elapsed_s = now - self._last
        self.seconds[stage] += elapsed_s
        self._last = now
        pulse = self._pulse
        pulse.beats += 1
        pulse.stage = stage
        if stage == self._work:
            pulse.work_s += elapsed_s
            pulse.works += 1


class DeadlineError(RuntimeError):
    """A wait passed its deadline; the message names who waited for whom and how long."""


class Waiter:
    """What a rank does between two polls of an unfinished message.

    Args:
      policy: spin (poll again at once), yield (give up the core first) or backoff (sleep
        for a share of the time waited, up to 2 ms).
      deadline_s: longest wait without progress.
      describe: called only when the deadline passes; says who waits for whom, on what.
      pulse: beaten while it waits.
    """

    def __init__(
        self,
        policy: WaitPolicy,
        deadline_s: float,
        describe: Callable[[], str],
        pulse: Pulse | None = None,
    ):
        self._policy = policy
        self._pulse = pulse or Pulse()
        self._deadline_s = deadline_s
        self._describe = describe
        self._since: float | None = None

    def progress(self) -> None:
        """Something arrived: the wait starts anew."""
        self._since = None

    def idle(self, at_most_s: float = _LONGEST_SLEEP_S) -> None:
        """Nothing arrived: wait a little, `at_most_s` seconds.

        Raises:
          DeadlineError: nothing arrived for `deadline_s`.
        """
        self._pulse.beats += 1
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited_s = now - self._since
        if waited_s > self._deadline_s:
            raise DeadlineError(f"{self._describe()}: nothing for {waited_s:.1f} s")
        if self._policy == "backoff":
            time.sleep(min(at_most_s, backoff_sleep_s(waited_s)))
        elif self._policy == "yield":
            os.sched_yield()


def backoff_sleep_s(waited_s: float) -> float:
    """Return how long a rank that has waited `waited_s` sleeps before it looks again."""
    return min(_LONGEST_SLEEP_S, max(_FIRST_SLEEP_S, waited_s * _SLEEP_SHARE))


def choose_wait_policy(configured: str, node_threads: int, node_cores: int) -> WaitPolicy:
    """Resolve `auto`: backoff when more threads than cores compute on a node, else yield."""
    if configured == "auto":
        return "backoff" if node_threads > node_cores else "yield"
    if configured not in ("spin", "yield", "backoff"):
        raise ValueError(f"wait policy {configured!r} is none of auto, spin, yield, backoff")
    return configured  # type: ignore[return-value]
