"""Gradients from workers to the servers that share the parameters, and parameters back.

A worker sends each server the gradient of its shard and waits for all of their answers; a server
answers each gradient by itself. So at most one gradient of each worker is on its way, and nobody
waits for another worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Incoming, Link, wait_until
from hpcrl.comm.wire import METRIC_PREFIX, Layout, Tag

_FIGURES = ("loss", "grad_norm")


class Fate(NamedTuple):
    """What became of a gradient on the shards that it went to.

    Attributes:
      applied: shards that took it.
      dropped: shards on which it was too old.
      lag_sum: versions that it was behind, over the shards that took it.
      lag_max: the largest of these.
    """

    applied: int = 0
    dropped: int = 0
    lag_sum: int = 0
    lag_max: int = 0


class Arrived(NamedTuple):
    """A gradient as a server gets it.

    Attributes:
      version: of the shard that it was computed from.
      num_steps: transitions that it is the mean over; 0: there is none, only the parameters are
        asked for.
      previous: the fate of the gradient before it of the same worker.
      figures: loss and grad_norm of the whole gradient.
      metrics: the agent's, sums over the transitions.
      gradient: `<float32>[n]`, a view.
    """

    version: int
    num_steps: int
    previous: Fate
    figures: dict[str, float]
    metrics: dict[str, float]
    gradient: npt.NDArray[np.float32]


class GradientInbox:
    """A server's end: gradients of its shard, each of which it answers.

    Args:
      link: this rank's link.
      workers: ranks that send gradients.
      gradients: the gradient message of this shard.
      parameters: the answer.
    """

    def __init__(self, link: Link, workers: Sequence[int], gradients: Layout, parameters: Layout):
        plane = link.plane("gradients")
        self._workers = workers
        self._lost_ranks = link.lost_ranks
        buffers, answers = gradients.buffer(len(workers)), parameters.buffer(len(workers))
        self._views, self._answers = gradients.views(buffers), parameters.views(answers)
        self._metrics = [name for name in gradients.fields if name.startswith(METRIC_PREFIX)]
        self._receivers = plane.receivers(
            [Incoming(rank, Tag.GRADIENT, buffers[i]) for i, rank in enumerate(workers)]
        )
        self._senders = [
            plane.sender(rank, Tag.PARAMETERS, answers[i]) for i, rank in enumerate(workers)
        ]
        self._waiter = link.waiter(
            lambda: f"{link.label} (rank {link.rank}) waited for a worker to take its parameters"
        )
        for index in range(len(workers)):
            self._receivers.start(index)

    def poll(self) -> Sequence[int]:
        """Return the indices of workers whose gradient has arrived; `answer` each of them."""
        return self._receivers.poll()

    def arrived(self, index: int) -> Arrived:
        """Return the gradient of a worker, valid until it is answered."""
        views = self._views
        return Arrived(
            int(views["version"][index]),
            int(views["num_steps"][index]),
            Fate(*(int(views[name][index]) for name in Fate._fields)),
            {name: float(views[name][index]) for name in _FIGURES},
            {n.removeprefix(METRIC_PREFIX): float(views[n][index]) for n in self._metrics},
            views["gradient"][index],
        )

    def answer(
        self,
        index: int,
        parameters: npt.NDArray[np.float32],
        version: int,
        lag: int = 0,
        applied: bool = False,
    ) -> None:
        """Send a worker the shard as it is now, and await its next gradient.

        Args:
          index: of the worker.
          parameters: `<float32>[n]`, copied.
          version: of the shard, with the gradient if it was applied.
          lag: versions that the gradient was behind.
          applied: whether it was taken.
        """
        if self._workers[index] in self._lost_ranks:
            return
        # The worker has received the answer before, or it would not have sent; this is instant.
        wait_until(self._senders[index].done, self._waiter)
        answers = self._answers
        answers["version"][index], answers["lag"][index] = version, lag
        answers["applied"][index] = applied
        answers["parameters"][index] = parameters
        self._receivers.start(index)
        self._senders[index].start()

    def idle(self) -> bool:
        """Whether no answer is on its way any more."""
        return all(
            rank in self._lost_ranks or sender.done()
            for rank, sender in zip(self._workers, self._senders, strict=True)
        )

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()


class GradientExchange:
    """A worker's end: one gradient at a time, answered by all servers.

    Args:
      link: this rank's link.
      servers: ranks that hold the shards, in their order.
      gradients: the gradient message of each shard.
      parameters: the answer for each shard.

    Attributes:
      fate: of the last gradient.
      versions: of the shards of the parameters that came last, `<int64>[S]`.
    """

    def __init__(
        self,
        link: Link,
        servers: Sequence[int],
        gradients: Sequence[Layout],
        parameters: Sequence[Layout],
    ):
        plane = link.plane("gradients")
        self._servers = servers
        buffers = [layout.buffer() for layout in gradients]
        answers = [layout.buffer() for layout in parameters]
        self._messages = [g.views(b) for g, b in zip(gradients, buffers, strict=True)]
        self._answers = [p.views(b) for p, b in zip(parameters, answers, strict=True)]
        self._senders = [
            plane.sender(rank, Tag.GRADIENT, buffer)
            for rank, buffer in zip(servers, buffers, strict=True)
        ]
        self._receivers = plane.receivers(
            [
                Incoming(rank, Tag.PARAMETERS, buffer)
                for rank, buffer in zip(servers, answers, strict=True)
            ]
        )
        self._waiter = link.waiter(
            lambda: f"{link.label} (rank {link.rank}) waited to send gradients to {list(servers)}"
        )
        sizes = [layout.fields["gradient"].shape[0] for layout in gradients]
        self._edges = np.cumsum([0, *sizes])
        self._parameters = np.zeros(self._edges[-1], np.float32)
        self._missing: set[int] = set()
        self.fate = Fate()
        self.versions = np.full(len(servers), -1, np.int64)

    @property
    def open(self) -> bool:
        """Whether some server has not answered yet."""
        return bool(self._missing)

    def waits_for(self) -> list[int]:
        """Return the ranks of the servers that have not answered."""
        return [self._servers[index] for index in sorted(self._missing)]

    def ask(self) -> None:
        """Ask all servers for their parameters, without a gradient."""
        for message in self._messages:
            message["num_steps"][...] = 0
        self._send()

    def send(
        self,
        gradient: npt.NDArray[np.float32],
        num_steps: int,
        figures: Mapping[str, float],
        metrics: Mapping[str, float],
    ) -> None:
        """Send the gradient at the parameters that came last; see `Arrived`.

        Args:
          gradient: `<float32>[P]`, copied.
          num_steps: transitions that it is the mean over.
          figures: loss and grad_norm.
          metrics: those that the message declares.
        """
        wait_until(lambda: all(sender.done() for sender in self._senders), self._waiter)
        for index, message in enumerate(self._messages):
            message["num_steps"][...] = num_steps
            message["version"][...] = self.versions[index]
            for name, value in (*self.fate._asdict().items(), *figures.items()):
                message[name][...] = value
            for name, value in metrics.items():
                message[METRIC_PREFIX + name][...] = value
            message["gradient"][...] = gradient[self._edges[index] : self._edges[index + 1]]
        self._send()

    def _send(self) -> None:
        self._missing = set(range(len(self._servers)))
        for index, sender in enumerate(self._senders):
            self._receivers.start(index)
            sender.start()

    def poll(self) -> npt.NDArray[np.float32] | None:
        """Return the parameters `<float32>[P]` once all servers have answered, else None.

        The array is written again when the next answers come.
        """
        for index in self._receivers.poll():
            self._missing.discard(index)
            first, last = self._edges[index], self._edges[index + 1]
            self._parameters[first:last] = self._answers[index]["parameters"]
        if self._missing:
            return None
        self.versions[:] = [answer["version"] for answer in self._answers]
        sent = int(self._messages[0]["num_steps"]) > 0
        lags = [int(a["lag"]) for a in self._answers if sent and a["applied"]]
        # One that is thrown away because the run ends has lag 0.
        dropped = sum(sent and not a["applied"] and a["lag"] > 0 for a in self._answers)
        self.fate = Fate(len(lags), int(dropped), sum(lags), max(lags, default=0))
        return self._parameters

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()
