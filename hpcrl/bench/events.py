"""Simulated time: a clock of events, cores that ranks share, and network interfaces."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Done = Callable[[], None]

_NICE_FACTOR = 1.25
"""A level of niceness is worth this factor of processor time in Linux's scheduler."""


class Clock:
    """Runs what is due in the order of its time.

    Attributes:
      now: seconds since the start.
      events: that have been run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act` in `delay_s` seconds; what is due at once runs in the order of asking."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, act, arguments))

    @property
    def still(self) -> bool:
        """Whether nothing will ever happen."""
        return not self._queue

    def run(self, until_s: float, at_most: int) -> None:
        """Run all events up to a time, but stop after the one that is number `at_most`."""
        queue = self._queue
        while queue and queue[0][0] <= until_s and self.events < at_most:
            self.now, _, act, arguments = heapq.heappop(queue)
            self.events += 1
            act(*arguments)
        if self.events < at_most:
            self.now = until_s


class _Task:
    __slots__ = ("done", "left_s", "rate", "weight")

    def __init__(self, work_s: float, weight: float, done: Done):
        self.left_s = work_s
        self.weight = weight
        self.done = done
        self.rate = 0.0


class Cores:
    """Cores that compute several single-threaded tasks at once, each on one core at most.

    With more tasks than cores each gets a share by its weight, as a fair scheduler gives it.

    Args:
      clock: of the simulation.
      count: cores; a part of one is allowed.
      poll_share: of a core that each waiting rank takes for its polls.

    Attributes:
      busy_s: core seconds that tasks have used.
      waiting: ranks that wait and poll.
    """

    def __init__(self, clock: Clock, count: float, poll_share: float = 0.0):
        self.count = count
        self.busy_s = 0.0
        self.waiting = 0
        self._clock = clock
        self._poll_share = poll_share
        self._tasks: list[_Task] = []
        self._last_s = 0.0
        self._plan = 0

    def compute(self, work_s: float, done: Done, nice: int = 0) -> None:
        """Call `done` once `work_s` seconds of one core have been spent."""
        self._advance()
        self._tasks.append(_Task(work_s, _NICE_FACTOR**-nice, done))
        self._replan()

    def _advance(self) -> None:
        elapsed_s = self._clock.now - self._last_s
        self._last_s = self._clock.now
        if elapsed_s > 0.0:
            for task in self._tasks:
                task.left_s -= elapsed_s * task.rate
                self.busy_s += elapsed_s * task.rate

    def _replan(self) -> None:
        self._plan += 1
        if not self._tasks:
            return
        self._share_out()
        first_s = min(max(task.left_s, 0.0) / task.rate for task in self._tasks)
        self._clock.after(first_s, self._finish, self._plan)

    def _share_out(self) -> None:
        free = max(self.count - self._poll_share * self.waiting, 0.1 * self.count)
        if len(self._tasks) <= free:
            for task in self._tasks:
                task.rate = 1.0
            return
        # The heaviest first: what one can't use of its share, as it has one core, the others get.
        total = sum(task.weight for task in self._tasks)
        for task in sorted(self._tasks, key=lambda task: -task.weight):
            task.rate = min(1.0, free * task.weight / total)
            free -= task.rate
            total -= task.weight

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended = [task for task in self._tasks if task.left_s <= 1e-12 + 1e-9 * self._clock.now]
        self._tasks = [task for task in self._tasks if task not in ended]
        self._replan()
        for task in ended:
            task.done()


class Interface:
    """A node's network interface, which takes in one message after the other.

    Attributes:
      busy_s: seconds in which bytes came in.
    """

    def __init__(self, clock: Clock, latency_s: float, bytes_per_s: float):
        self.busy_s = 0.0
        self._clock = clock
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def receive(self, nbytes: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act` once a message that is sent now has come in."""
        taken_s = nbytes / self._bytes_per_s
        self._free_s = max(self._free_s, self._clock.now + self._latency_s) + taken_s
        self.busy_s += taken_s
        self._clock.after(self._free_s - self._clock.now, act, *arguments)
