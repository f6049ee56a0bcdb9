"""The interface that the roles are written against: persistent messages and few collectives.

`transport` implements it over MPI, `loopback` inside one process. All buffers are
contiguous numpy arrays that belong to the endpoint from its creation on; an endpoint
never allocates, pickles or copies on the hot path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hpcrl.timing import Pulse, Waiter, WaitPolicy

PLANES = ("steps", "unrolls", "weights", "gradients", "control")
"""One duplicated communicator each, so that planes can't match each other's messages."""

Bytes = npt.NDArray[np.uint8]


class PeerLostError(RuntimeError):
    """A rank that the run can't do without has died."""


class Incoming(NamedTuple):
    """One receive to post: `source` rank, `tag`, and the 1-D buffer that it lands in."""

    source: int
    tag: int
    buffer: Bytes


class Receivers(Protocol):
    """A fixed set of persistent receives."""

    def start(self, index: int) -> None:
        """Post receive `index`. Its buffer must not be touched until `poll` reports it."""

    def poll(self) -> Sequence[int]:
        """Return the indices that completed since the last call, without waiting."""

    def cancel(self) -> None:
        """Withdraw every posted receive; messages already matched are discarded."""


class Sender(Protocol):
    """One persistent send."""

    def start(self) -> None:
        """Send the buffer, which must stay untouched until `done`. Not while in flight."""

    def done(self) -> bool:
        """Whether the buffer may be reused (also true before the first start)."""


class Plane(Protocol):
    """One plane's point-to-point endpoints."""

    def receivers(self, incoming: Sequence[Incoming]) -> Receivers:
        """Create persistent receives; none is posted yet."""

    def sender(self, dest: int, tag: int, buffer: Bytes, *, synchronous: bool = False) -> Sender:
        """Create a persistent send.

        A synchronous one is done only once its receiver has matched it, so the number of
        such senders bounds what is in flight: they are the credits.

        `buffer` may be shorter than the receive buffer, unless one of them is longer than
        `max_message_bytes` of the link: both ends must split a message alike.
        """


class Gathering(Protocol):
    """An all-gather under way."""

    def done(self) -> bool:
        """Whether every member's array is here."""

    @property
    def result(self) -> npt.NDArray[Any]:
        """The members' arrays stacked in a new first axis, once `done`."""


class Group(Protocol):
    """Collectives over some ranks, polled with a deadline.

    Every member calls the same collectives in the same order.
    """

    rank: int
    size: int
    communicator: Any
    """The MPI communicator for libraries that need one (Horovod), else None."""
    thread_multiple: bool
    """Whether other threads of this process may call MPI, as Horovod's does."""

    def waiter(self, what: str) -> Waiter:
        """Return a waiter that names this member and `what` it waited in."""

    def allreduce(self, array: npt.NDArray[Any], op: Literal["sum", "max", "min"]) -> None:
        """Reduce `array` over the group, in place."""

    def allgather(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return every member's `array` stacked in a new first axis."""

    def start_allgather(self, array: npt.NDArray[Any]) -> Gathering:
        """Begin an all-gather of `array`, which may be reused at once."""

    def broadcast(self, data: bytes | None, root: int) -> bytes:
        """Return `data` of group rank `root` on every member."""

    def barrier(self) -> None:
        """Return once every member has called."""


class Link(Protocol):
    """A rank's connection to the others."""

    rank: int
    size: int
    label: str
    """Role and index, such as "actor 3", for messages about waits."""
    wait_policy: WaitPolicy
    pulse: Pulse
    """Beaten by this link's waiters."""
    expendable: frozenset[int]
    """Ranks whose death the run survives, where the launcher allows that."""
    lost_ranks: set[int]
    """Those of them that this rank has seen to be dead; grows while receives are polled."""
    deadline_s: float
    """Longest wait of waiters made from now on."""
    max_message_bytes: int
    """Endpoints and groups made from now on split longer messages into parts of this size."""

    def plane(self, name: str) -> Plane:
        """Return one of `PLANES`."""

    def group(self, ranks: Sequence[int]) -> Group | None:
        """Collective over all ranks of the link: the group of `ranks`, None if not in it."""

    def team(self, teams: Sequence[Sequence[int]]) -> Group | None:
        """Collective over all ranks of the link: the group of this rank's one of `teams`.

        No rank is in two of them; None if this rank is in none.
        """

    def waiter(self, describe: Callable[[], str], deadline_s: float | None = None) -> Waiter:
        """Return a waiter with this link's policy and deadline.

        `deadline_s` None means the link's.
        """


def wait_until(done: Callable[[], bool], waiter: Waiter) -> None:
    """Poll `done` until it is true, as `waiter` says.

    Raises:
      DeadlineError: it stayed false past the waiter's deadline.
    """
    while not done():
        waiter.idle()
    waiter.progress()


def split_bytes(buffer: Bytes, part_bytes: int) -> list[Bytes]:
    """Return views of `buffer`'s consecutive parts of at most `part_bytes` (one at least)."""
    starts = range(0, max(len(buffer), 1), part_bytes)
    return [buffer[start : start + part_bytes] for start in starts]
