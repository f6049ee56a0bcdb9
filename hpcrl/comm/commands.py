"""Commands from a learner to the ranks that feed it, and their answer when they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrl.comm.link import Incoming, Link, wait_until
from hpcrl.comm.wire import Command, Tag, command_layout


class CommandSender:
    """The learner's end: one command to all its clients, and who has finished."""

    def __init__(self, link: Link, clients: Sequence[int]):
        layout, plane = command_layout(), link.plane("control")
        self._link = link
        self._clients = clients
        self._buffer = layout.buffer()
        self._command = layout.views(self._buffer)["command"]
        self._senders = [plane.sender(rank, Tag.COMMAND, self._buffer) for rank in clients]
        self._done_buffers = layout.buffer(len(clients))
        self._done = plane.receivers(
            [Incoming(rank, Tag.DONE, self._done_buffers[i]) for i, rank in enumerate(clients)]
        )
        self._missing = set(range(len(clients)))
        for index in self._missing:
            self._done.start(index)

    def send(self, command: Command) -> None:
        """Send `command` to every client."""
        waiter = self._link.waiter(lambda: f"{self._link.label} waited to send {command.name}")
        wait_until(lambda: all(self._senders[i].done() for i in self._living()), waiter)
        self._command[...] = command
        for index in self._living():
            self._senders[index].start()

    def _living(self) -> list[int]:
        lost = self._link.lost_ranks
        return [index for index, rank in enumerate(self._clients) if rank not in lost]

    def await_done(self, serve: Callable[[], None]) -> None:
        """Call `serve` until every client has said DONE."""
        waiter = self._link.waiter(
            lambda: (
                f"{self._link.label} waited at shut-down for ranks "
                f"{[self._clients[i] for i in self._missing]}"
            )
        )
        while self._missing:
            serve()
            finished = self._done.poll()
            self._missing.difference_update(finished)
            self._missing.intersection_update(self._living())
            if finished:
                waiter.progress()
            else:
                waiter.idle()

    def close(self) -> None:
        """Free the receives."""
        self._done.cancel()


class StopRequester:
    """One of several servers' end: tells the root that a stop is wanted."""

    def __init__(self, link: Link, root: int):
        self._sender = link.plane("control").sender(
            root, Tag.STOP_WANTED, command_layout().buffer()
        )
        self._asked = False

    def ask(self) -> None:
        """Ask once; later calls do nothing."""
        if not self._asked:
            self._asked = True
            self._sender.start()


class StopRequests:
    """The root's end."""

    def __init__(self, link: Link, ranks: Sequence[int]):
        self._ranks = ranks
        buffers = command_layout().buffer(len(ranks))
        self._receivers = link.plane("control").receivers(
            [Incoming(rank, Tag.STOP_WANTED, buffers[i]) for i, rank in enumerate(ranks)]
        )
        for index in range(len(ranks)):
            self._receivers.start(index)

    def poll(self) -> list[int]:
        """Return the ranks that ask for a stop since the last call."""
        return [self._ranks[index] for index in self._receivers.poll()]

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()


class CommandReceiver:
    """A client's end."""

    def __init__(self, link: Link, learner: int):
        layout, plane = command_layout(), link.plane("control")
        buffer = layout.buffer()
        self._command = layout.views(buffer)["command"]
        self._receiver = plane.receivers([Incoming(learner, Tag.COMMAND, buffer)])
        self._receiver.start(0)
        self._done = plane.sender(learner, Tag.DONE, layout.buffer())

    def poll(self) -> Command | None:
        """Return a command that has arrived, else None."""
        if not self._receiver.poll():
            return None
        command = Command(int(self._command))
        self._receiver.start(0)
        return command

    def say_done(self) -> None:
        """Tell the learner that this rank sends nothing more."""
        self._done.start()

    def close(self) -> None:
        """Withdraw the posted receive."""
        self._receiver.cancel()
