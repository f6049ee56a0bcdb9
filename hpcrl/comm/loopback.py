"""The link inside one process: each rank is a thread. For tests and debugging.

It keeps MPI's rules that the roles rely on: messages of one (source, dest, tag) arrive in
order, receives match in the order in which they were posted, a synchronous send is done
only when matched. It adds one: after `World.fail` every wait raises, so that a failure in
one role ends all of them.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Bytes, Incoming, wait_until
from hpcrl.timing import Pulse, Waiter, WaitPolicy

_Address = tuple[str, int, int, int]
"""Plane, source, dest, tag."""


class PeerFailedError(RuntimeError):
    """Another rank of this world has failed."""


class _Message:
    def __init__(self, data: Bytes):
        self.data = data
        self.matched = False


class World:
    """`size` ranks in one process."""

    def __init__(self, size: int, deadline_s: float = 30.0):
        self.size = size
        self.deadline_s = deadline_s
        self.lock = threading.Lock()
        self.mail: dict[_Address, deque[_Message]] = defaultdict(deque)
        self.failure: BaseException | None = None
        self._collectives: dict[Any, Meeting] = {}

    def link(self, rank: int) -> LoopbackLink:
        """Return rank `rank`'s link."""
        return LoopbackLink(self, rank)

    def fail(self, error: BaseException) -> None:
        """Make every present and later wait of all ranks raise."""
        self.failure = self.failure or error

    def check(self) -> None:
        """Raise if a rank has failed."""
        if self.failure is not None:
            raise PeerFailedError("another rank failed") from self.failure

    def meet(self, key: Any, size: int, member: int, value: Any) -> Meeting:
        """Leave `value` as `member` of the collective call `key`, made by its first caller."""
        with self.lock:
            meeting = self._collectives.setdefault(key, Meeting(self, size))
            meeting.values[member] = value
            meeting.arrived += 1
            if meeting.arrived == size:
                del self._collectives[key]
        return meeting


class Meeting:
    """One collective call: every member leaves a value, all take the whole list."""

    def __init__(self, world: World, size: int):
        self._world = world
        self.values: list[Any] = [None] * size
        self.arrived = 0

    def done(self) -> bool:
        """Whether every member has called."""
        self._world.check()
        return self.arrived == len(self.values)

    @property
    def result(self) -> npt.NDArray[Any]:
        """The values of an all-gather."""
        return np.stack(self.values)


class LoopbackReceivers:
    """Receives that copy from the mailbox when polled."""

    def __init__(self, world: World, plane: str, rank: int, incoming: Sequence[Incoming]):
        self._world = world
        self._buffers = [i.buffer for i in incoming]
        self._address: list[_Address] = [(plane, i.source, rank, i.tag) for i in incoming]
        self._posted: dict[_Address, deque[int]] = defaultdict(deque)

    def start(self, index: int) -> None:
        """Post receive `index`."""
        self._posted[self._address[index]].append(index)

    def poll(self) -> Sequence[int]:
        """Return the indices that completed."""
        self._world.check()
        complete = []
        with self._world.lock:
            for address, posted in self._posted.items():
                mail = self._world.mail[address]
                while posted and mail:
                    index, message = posted.popleft(), mail.popleft()
                    if len(message.data) > len(self._buffers[index]):
                        raise ValueError(
                            f"message {address} of {len(message.data)} bytes is "
                            f"longer than its buffer {len(self._buffers[index])}"
                        )
                    self._buffers[index][: len(message.data)] = message.data
                    message.matched = True
                    complete.append(index)
        return complete

    def cancel(self) -> None:
        """Withdraw posted receives."""
        self._posted.clear()


class LoopbackSender:
    """A send that copies into the mailbox when started."""

    def __init__(self, world: World, address: _Address, buffer: Bytes, synchronous: bool):
        self._world = world
        self._address = address
        self._buffer = buffer
        self._synchronous = synchronous
        self._message: _Message | None = None

    def start(self) -> None:
        """Start the send."""
        if not self.done():
            raise RuntimeError(f"send {self._address} started again while in flight")
        self._message = _Message(self._buffer.copy())
        with self._world.lock:
            self._world.mail[self._address].append(self._message)

    def done(self) -> bool:
        """Whether the buffer may be reused."""
        self._world.check()
        return self._message is None or self._message.matched or not self._synchronous


class LoopbackPlane:
    """Endpoints of one rank on one plane."""

    def __init__(self, world: World, name: str, rank: int):
        self._world, self._name, self._rank = world, name, rank

    def receivers(self, incoming: Sequence[Incoming]) -> LoopbackReceivers:
        """Create receives."""
        return LoopbackReceivers(self._world, self._name, self._rank, incoming)

    def sender(
        self, dest: int, tag: int, buffer: Bytes, *, synchronous: bool = False
    ) -> LoopbackSender:
        """Create a send."""
        address = (self._name, self._rank, dest, tag)
        return LoopbackSender(self._world, address, buffer, synchronous)


class LoopbackGroup:
    """Collectives over some ranks of a world."""

    communicator = None
    thread_multiple = False

    def __init__(self, link: LoopbackLink, ranks: Sequence[int], key: int):
        self.rank = list(ranks).index(link.rank)
        self.size = len(ranks)
        self._link = link
        self._key = key
        self._calls = 0

    def waiter(self, what: str) -> Waiter:
        """Return a waiter that names this member and `what` it waited in."""
        link = self._link
        return link.waiter(lambda: f"{link.label} (rank {link.rank}) waited in {what}")

    def _meet(self, value: Any) -> Meeting:
        self._calls += 1
        return self._link.world.meet((self._key, self._calls), self.size, self.rank, value)

    def _exchange(self, value: Any, what: str) -> list[Any]:
        meeting = self._meet(value)
        wait_until(meeting.done, self.waiter(what))
        return meeting.values

    def allreduce(self, array: npt.NDArray[Any], op: Literal["sum", "max", "min"]) -> None:
        """Reduce `array`, in place; every member adds in the same order."""
        reduce = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op].reduce
        what = f"an all-reduce ({op}) of {array.size} values"
        array[...] = reduce(np.stack(self._exchange(array.copy(), what)), axis=0)

    def allgather(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return every member's `array`, stacked."""
        return np.stack(self._exchange(array.copy(), f"an all-gather of {array.size} values"))

    def start_allgather(self, array: npt.NDArray[Any]) -> Meeting:
        """Begin an all-gather of `array`."""
        return self._meet(array.copy())

    def broadcast(self, data: bytes | None, root: int) -> bytes:
        """Return `data` of `root`."""
        value = self._exchange(data, f"a broadcast from member {root}")[root]
        if not isinstance(value, bytes):
            raise TypeError(f"member {root} broadcast {type(value).__name__}, not bytes")
        return value

    def barrier(self) -> None:
        """Return once every member has called."""
        self._exchange(None, "a barrier")


class LoopbackLink:
    """One rank of a `World`."""

    def __init__(self, world: World, rank: int):
        self.world = world
        self.rank = rank
        self.size = world.size
        self.label = f"rank {rank}"
        self.pulse = Pulse()
        self.expendable: frozenset[int] = frozenset()
        self.lost_ranks: set[int] = set()
        self.wait_policy: WaitPolicy = "backoff"
        self.deadline_s = world.deadline_s
        self.max_message_bytes = 2**31 - 1  # no message is split here
        self._num_groups = 0

    def plane(self, name: str) -> LoopbackPlane:
        """Return a plane."""
        return LoopbackPlane(self.world, name, self.rank)

    def group(self, ranks: Sequence[int]) -> LoopbackGroup | None:
        """Return the group of `ranks`; every rank of the world must call, in one order."""
        self._num_groups += 1
        return LoopbackGroup(self, ranks, self._num_groups) if self.rank in ranks else None

    def team(self, teams: Sequence[Sequence[int]]) -> LoopbackGroup | None:
        """Return the group of this rank's one of `teams`; every rank must call, in one order."""
        mine = [self.group(ranks) for ranks in teams]
        return next((group for group in mine if group), None)

    def waiter(self, describe: Callable[[], str], deadline_s: float | None = None) -> Waiter:
        """Return a waiter that backs off."""
        return Waiter(self.wait_policy, deadline_s or self.deadline_s, describe, self.pulse)
