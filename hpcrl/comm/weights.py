"""Weights from a learner to whoever acts: whole, versioned copies, the latest only.

The acting side asks for anything newer than it has and the learner answers from a
snapshot, so at most one copy is on its way to each receiver, versions may be skipped, and
a slow receiver never holds the learner up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Incoming, Link, Sender, wait_until
from hpcrl.comm.wire import Tag, weights_layout, weights_request_layout

_SNAPSHOTS = 2


class WeightsPublisher:
    """The learner's end.

    Args:
      link: this rank's link.
      clients: ranks that ask for weights.
      num_parameters: length of the flat float32 parameter buffer.
    """

    def __init__(self, link: Link, clients: Sequence[int], num_parameters: int):
        plane = link.plane("weights")
        layout, request = weights_layout(num_parameters), weights_request_layout()
        self._request_buffers = request.buffer(len(clients))
        self._have = request.views(self._request_buffers)["have_version"]
        self._requests = plane.receivers(
            [
                Incoming(rank, Tag.WEIGHTS_REQUEST, self._request_buffers[i])
                for i, rank in enumerate(clients)
            ]
        )
        self._snapshots = layout.buffer(_SNAPSHOTS)
        self._views = layout.views(self._snapshots)
        self._views["version"][:] = -1
        self._senders = [
            [plane.sender(rank, Tag.WEIGHTS, self._snapshots[s]) for rank in clients]
            for s in range(_SNAPSHOTS)
        ]
        self._clients = clients
        self._lost_ranks = link.lost_ranks
        self._asking: set[int] = set()
        for index in range(len(clients)):
            self._requests.start(index)

    def serve(
        self, parameters: Callable[[], npt.NDArray[np.float32]], version: int, frames: int = 0
    ) -> None:
        """Answer clients that have an older version; returns at once.

        Args:
          parameters: gives the current weights `<float32>[P]`; called, and its result copied,
            only when a client needs them.
          version: their version, never decreasing.
          frames: emulator frames that they were trained on.
        """
        self._asking.update(self._requests.poll())
        due = [
            client
            for client in self._asking
            if self._have[client] < version and self._clients[client] not in self._lost_ranks
        ]
        if not due:
            return
        snapshot = self._snapshot_of(parameters, version, frames)
        if snapshot is None:
            return
        for client in due:
            self._senders[snapshot][client].start()
            self._asking.discard(client)
            self._requests.start(client)

    def _snapshot_of(
        self, parameters: Callable[[], npt.NDArray[np.float32]], version: int, frames: int
    ) -> int | None:
        versions = self._views["version"]
        for snapshot in range(_SNAPSHOTS):
            if versions[snapshot] == version:
                return snapshot
        for snapshot, senders in enumerate(self._senders):
            if self._all_done(senders):
                self._views["parameters"][snapshot] = parameters()
                self._views["frames"][snapshot] = frames
                versions[snapshot] = version
                return snapshot
        return None

    def idle(self) -> bool:
        """Whether no copy is on its way any more."""
        return all(self._all_done(senders) for senders in self._senders)

    def _all_done(self, senders: Sequence[Sender]) -> bool:
        """Whether the buffer is free again; what goes to the dead never arrives."""
        return all(
            rank in self._lost_ranks or sender.done()
            for rank, sender in zip(self._clients, senders, strict=True)
        )

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._requests.cancel()


class WeightsSubscriber:
    """The acting side's end.

    Args:
      link: this rank's link.
      learner: rank of the learner to ask.
      num_parameters: length of the flat float32 parameter buffer.
    """

    def __init__(self, link: Link, learner: int, num_parameters: int):
        plane = link.plane("weights")
        layout, request = weights_layout(num_parameters), weights_request_layout()
        self._request_buffer = request.buffer()
        self._have = request.views(self._request_buffer)["have_version"]
        self._buffer = layout.buffer()
        self._views = layout.views(self._buffer)
        self._receiver = plane.receivers([Incoming(learner, Tag.WEIGHTS, self._buffer)])
        self._request = plane.sender(learner, Tag.WEIGHTS_REQUEST, self._request_buffer)
        self._waiter = link.waiter(lambda: f"{link.label} waited to ask rank {learner} for weights")
        self.version = -1
        self.frames = 0
        self._ask()

    def _ask(self) -> None:
        # An answer has arrived, so the request before has left; this returns at once.
        wait_until(self._request.done, self._waiter)
        self._have[...] = self.version
        self._receiver.start(0)
        self._request.start()

    def poll(self) -> npt.NDArray[np.float32] | None:
        """Return newer weights `<float32>[P]` when they have arrived, else None.

        The view is valid until `renew`, which must follow once it was copied.
        """
        if not self._receiver.poll():
            return None
        self.version = int(self._views["version"])
        self.frames = int(self._views["frames"])
        parameters: npt.NDArray[np.float32] = self._views["parameters"]
        return parameters

    def renew(self) -> None:
        """Ask for the next version; the last view is invalid from here on."""
        self._ask()

    def close(self) -> None:
        """Withdraw the posted receive."""
        self._receiver.cancel()
