"""What a run has done so far: counters, recent episodes and rates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

WINDOW_EPISODES = 100


@dataclass
class Counters:
    """Totals over all restarts.

    Attributes:
      learner_steps: gradient updates.
      agent_steps: agent steps trained on.
      frames: emulator frames trained on (agent steps times frame skip).
      episodes: episodes that ended.
      wall_time_s: seconds of training.
      stale_unrolls_dropped: unrolls that were too old to be trained on.
    """

    learner_steps: int = 0
    agent_steps: int = 0
    frames: int = 0
    episodes: int = 0
    wall_time_s: float = 0.0
    stale_unrolls_dropped: int = 0

    def to_dict(self) -> dict[str, int | float]:
        """Return what `from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Counters:
        """Return the counters that `to_dict` described.

        Raises:
          TypeError: a name is unknown.
        """
        return cls(**data)


class RollingReturns:
    """Undiscounted returns and lengths of the last 100 episodes."""

    def __init__(self) -> None:
        self._episodes: deque[tuple[float, int]] = deque(maxlen=WINDOW_EPISODES)

    def extend(self, episodes: Iterable[tuple[float, int]]) -> None:
        """Add (return, agent steps) of finished episodes, oldest first."""
        self._episodes.extend((float(score), int(steps)) for score, steps in episodes)

    @property
    def full(self) -> bool:
        """Whether the mean is over 100 episodes, as a stop condition wants."""
        return len(self._episodes) == WINDOW_EPISODES

    @property
    def mean_return(self) -> float | None:
        """Mean return, None before the first episode."""
        return self.values()["mean_return_100"]

    def values(self) -> dict[str, float | None]:
        """Return the metrics of the window; means are None before the first episode.

        Returns:
          mean_return_100, mean_episode_steps_100 and, in episodes_100, how many episodes they
          are over.
        """
        count = len(self._episodes)
        sums = [float(sum(column)) for column in zip(*self._episodes, strict=True)] or [0.0, 0.0]
        means = [total / count if count else None for total in sums]
        return {
            "mean_return_100": means[0],
            "mean_episode_steps_100": means[1],
            "episodes_100": count,
        }

    def to_list(self) -> list[list[float]]:
        """Return JSON-able state for a checkpoint."""
        return [[score, steps] for score, steps in self._episodes]

    @classmethod
    def from_list(cls, state: Iterable[Iterable[float]]) -> RollingReturns:
        """Return the window that `to_list` described."""
        window = cls()
        window.extend((score, int(steps)) for score, steps in state)
        return window


class Meter:
    """Turns totals into rates per second between two readings.

    Args:
      totals: the totals at the start (those of the checkpoint after a resume).
      clock: monotonic seconds.
    """

    def __init__(self, totals: Mapping[str, float], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since_s = clock()
        self._totals = dict(totals)

    def rates(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return increase per second of each total since the last call.

        Of a total in seconds that is its share of the time. A name that was not there before
        counts from 0.
        """
        now_s = self._clock()
        elapsed_s = max(now_s - self._since_s, 1e-9)
        previous = self._totals
        self._since_s, self._totals = now_s, dict(totals)
        return {k: (total - previous.get(k, 0.0)) / elapsed_s for k, total in totals.items()}
