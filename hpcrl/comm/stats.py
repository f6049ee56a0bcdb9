"""Counters and episodes from every acting rank to the root learner, small and periodic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Incoming, Link
from hpcrl.comm.wire import Layout, Tag, stats_layout
from hpcrl.job import ACTOR_STAGES, GRADIENT_STAGES, INFERENCE_STAGES
from hpcrl.specs import ENV_FAILURES

_EPISODES_PER_MESSAGE = 256


class Episode(NamedTuple):
    """An episode that ended: unclipped return, agent steps, and whether it only measured."""

    score: float
    steps: int
    evaluation: bool


COUNTERS = (
    "env_steps",
    "episodes",
    "batches",
    "rows",
    "row_wait_s",
    "unrolls",
    "restarts",
    "lost_actors",
    "idle_rows",
    "dropped_gradients",
    "recorded_episodes",
    "dropped_episodes",
    "recorded_bytes",
    *(f"env_{kind}" for kind in ENV_FAILURES),
    *(f"inference_{stage}_s" for stage in INFERENCE_STAGES),
    *(f"actor_{stage}_s" for stage in ACTOR_STAGES),
    *(f"worker_{stage}_s" for stage in GRADIENT_STAGES),
)
"""What an acting rank counts; a message carries the increase since the previous one."""


def layout() -> Layout:
    """The stats message."""
    return stats_layout(COUNTERS, _EPISODES_PER_MESSAGE)


class StatsReporter:
    """An acting rank's end: accumulates, and sends when the previous message has left."""

    def __init__(self, link: Link, root: int, every_s: float):
        message = layout()
        self._buffer = message.buffer()
        self._views = message.views(self._buffer)
        self._sender = link.plane("control").sender(root, Tag.STATS, self._buffer)
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s
        self._sent = dict.fromkeys(COUNTERS, 0.0)
        self.totals = dict.fromkeys(COUNTERS, 0.0)
        self._episodes: deque[Episode] = deque()

    def add_episodes(
        self,
        returns: npt.NDArray[np.float32],
        steps: npt.NDArray[np.int32],
        evaluation: npt.NDArray[np.bool_],
    ) -> None:
        """Note episodes that ended."""
        self.totals["episodes"] += len(returns)
        columns = (returns.tolist(), steps.tolist(), evaluation.tolist())
        self._episodes.extend(map(Episode, *columns))

    def set_failures(self, counts: Sequence[int]) -> None:
        """Note how often environments have failed so far, in the order of `ENV_FAILURES`."""
        for kind, count in zip(ENV_FAILURES, counts, strict=True):
            self.totals[f"env_{kind}"] = count

    def set_stages(self, prefix: str, seconds: Mapping[str, float]) -> None:
        """Note total stage seconds as counters `prefix_stage_s`."""
        for stage, total in seconds.items():
            self.totals[f"{prefix}_{stage}_s"] = total

    @property
    def due(self) -> bool:
        """Whether a report is due and can be sent without waiting.

        It is also where a message is full of episodes: those of quick environments would else come
        later and later.
        """
        full = len(self._episodes) >= _EPISODES_PER_MESSAGE
        return (full or time.monotonic() >= self._next_s) and self.sent()

    def sent(self) -> bool:
        """Whether the last report has left, so that another can be sent."""
        return self._sender.done()

    def send(self) -> None:
        """Send the increase since the last report; the previous send must be done."""
        self._next_s = time.monotonic() + self._every_s
        views = self._views
        for name in COUNTERS:
            views[name][...] = self.totals[name] - self._sent[name]
            self._sent[name] = self.totals[name]
        count = min(len(self._episodes), _EPISODES_PER_MESSAGE)
        views["num_episodes"][...] = count
        for index in range(count):
            episode = self._episodes.popleft()
            views["episode_return"][index] = episode.score
            views["episode_steps"][index] = episode.steps
            views["episode_evaluation"][index] = episode.evaluation
        self._sender.start()

    def done(self) -> bool:
        """Whether nothing is on its way and no episode is left to report."""
        if not self.sent():
            return False
        if self._episodes:
            self.send()
            return False
        return True


class StatsCollector:
    """The root learner's end: sums over all acting ranks, and the episodes in order."""

    def __init__(self, link: Link, sources: Sequence[int]):
        message = layout()
        self._buffers = message.buffer(len(sources))
        self._views = message.views(self._buffers)
        self._receivers = link.plane("control").receivers(
            [Incoming(rank, Tag.STATS, self._buffers[i]) for i, rank in enumerate(sources)]
        )
        for index in range(len(sources)):
            self._receivers.start(index)
        self.totals = dict.fromkeys(COUNTERS, 0.0)
        self._episodes: list[Episode] = []

    def poll(self) -> None:
        """Take in what has arrived."""
        for index in self._receivers.poll():
            for name in COUNTERS:
                self.totals[name] += float(self._views[name][index])
            for place in range(int(self._views["num_episodes"][index])):
                self._episodes.append(
                    Episode(
                        float(self._views["episode_return"][index, place]),
                        int(self._views["episode_steps"][index, place]),
                        bool(self._views["episode_evaluation"][index, place]),
                    )
                )
            self._receivers.start(index)

    def take_episodes(self) -> list[Episode]:
        """Return the episodes since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()
