"""Who is slower than others of its role: a throttled core, a bad disk, a neighbour on the node."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.run.heartbeat import DIED, LEFT, Beat
from hpcrl.timing import Pulse

SLOW = 2.0
"""A rank is slow when its work takes this many times the median of its role."""
_LEAST_SHARE = 0.1
_LOOKS = 12


class WorkRate:
    """How long a loop's own work took lately, from looks at its pulse."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float, int]] = deque(maxlen=_LOOKS)

    def look(self, pulse: Pulse, now_s: float) -> tuple[float, float]:
        """Return the mean seconds of one piece of work, and the share of time spent on it."""
        self._looks.append((now_s, pulse.work_s, pulse.works))
        then_s, work_s, works = self._looks[0]
        done = pulse.works - works
        if not done or now_s <= then_s:
            return 0.0, 0.0
        spent_s = pulse.work_s - work_s
        return spent_s / done, min(1.0, spent_s / (now_s - then_s))


class Slow(NamedTuple):
    """A slow rank and what is usual in its role."""

    beat: Beat
    median_s: float
    num_ranks: int

    @property
    def factor(self) -> float:
        """How many times as long as usual it takes."""
        return self.beat.work_s / self.median_s

    def describe(self) -> str:
        """Role, rank and host, and how slow it is."""
        beat = self.beat
        return (
            f"{beat.name} (rank {beat.rank}, {beat.host}) is slow: its work takes "
            f"{1e3 * beat.work_s:.3g} ms, {self.factor:.1f} times the median of the "
            f"{self.num_ranks} ranks of its role"
        )


def slow_ranks(beats: Sequence[Beat]) -> list[Slow]:
    """Return the slow ranks, the slowest first.

    Of two ranks the faster one counts as usual. What a rank loses by being slow must be a tenth of
    its time at least: a scheduler's noise makes multiples of a microsecond.
    """
    roles: dict[str, list[Beat]] = defaultdict(list)
    for beat in beats:
        if beat.work_s > 0 and beat.stage not in (LEFT, DIED):
            roles[beat.name.split()[0]].append(beat)
    found = []
    for members in roles.values():
        median_s = statistics.median_low(beat.work_s for beat in members)
        for beat in members:
            lost_share = beat.work_share * (1 - median_s / beat.work_s)
            if beat.work_s > SLOW * median_s and lost_share > _LEAST_SHARE:
                found.append(Slow(beat, median_s, len(members)))
    return sorted(found, key=lambda slow: slow.factor, reverse=True)
