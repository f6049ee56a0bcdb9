"""Rounds of evaluation episodes, from evaluator ranks to the root learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcrl.comm.link import Incoming, Link
from hpcrl.comm.wire import Tag, round_layout
from hpcrl.evaluation.whole_episodes import Episode


class RoundReporter:
    """An evaluator's end.

    Args:
      link: this rank's link.
      root: rank of the root learner.
      episodes: of a round.
    """

    def __init__(self, link: Link, root: int, episodes: int):
        message = round_layout(episodes)
        buffer = message.buffer()
        self._views = message.views(buffer)
        self._sender = link.plane("control").sender(root, Tag.ROUND, buffer)

    def sent(self) -> bool:
        """Whether the last round has left, so that another can be sent."""
        return self._sender.done()

    def send(self, episodes: Sequence[Episode], version: int, frames: int, seconds: float) -> None:
        """Send a round; the one before must have left.

        Args:
          episodes: all of them.
          version: of the weights that played them.
          frames: emulator frames that those weights were trained on.
          seconds: that the round took.
        """
        views = self._views
        views["version"][...], views["frames"][...] = version, frames
        views["seconds"][...] = seconds
        for index, episode in enumerate(episodes):
            views["episode_return"][index] = episode.episode_return
            views["episode_steps"][index] = episode.agent_steps
            views["cut_off"][index] = episode.cut_off
        self._sender.start()


class RoundCollector:
    """The root learner's end."""

    def __init__(self, link: Link, evaluators: Sequence[int], episodes: int):
        message = round_layout(episodes)
        self._buffers = message.buffer(max(1, len(evaluators)))
        self._views = message.views(self._buffers)
        self._receivers = link.plane("control").receivers(
            [Incoming(rank, Tag.ROUND, self._buffers[i]) for i, rank in enumerate(evaluators)]
        )
        for index in range(len(evaluators)):
            self._receivers.start(index)
        self._rounds: list[dict[str, np.ndarray]] = []

    def poll(self) -> None:
        """Take in what has arrived."""
        for index in self._receivers.poll():
            self._rounds.append({name: view[index].copy() for name, view in self._views.items()})
            self._receivers.start(index)

    @property
    def pending(self) -> bool:
        """Whether a round has arrived since the last `take`."""
        return bool(self._rounds)

    def take(self) -> dict[str, float]:
        """Return the metrics of the rounds since the last call, over all of their episodes.

        Nothing when there were none. `eval/frames` and `eval/learner_steps` say how far training
        was when the weights that played were published.
        """
        rounds, self._rounds = self._rounds, []
        if not rounds:
            return {}
        means = {name: float(np.mean([r[name] for r in rounds])) for name in rounds[0]}
        return {
            "eval/return": means["episode_return"],
            "eval/median_return": float(np.median([r["episode_return"] for r in rounds])),
            "eval/episode_steps": means["episode_steps"],
            "eval/episodes": float(sum(len(r["episode_return"]) for r in rounds)),
            "eval/cut_off_episodes": float(sum(r["cut_off"].sum() for r in rounds)),
            "eval/frames": means["frames"],
            "eval/learner_steps": means["version"],
            "eval/seconds": means["seconds"],
        }

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()
