"""Unrolls on their way from the acting side to a learner, with credits and a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Incoming, Link
from hpcrl.comm.wire import Layout, Tag


class UnrollOutbox:
    """The acting side: `credits` synchronous sends; acting is held back while it is full.

    A synchronous send ends when the learner has matched it with a free slot of its queue,
    so what is in flight is at most `credits` here plus the learner's slots.
    """

    def __init__(self, link: Link, learner: int, layout: Layout, credits: int):
        self._buffers = layout.buffer(credits)
        plane = link.plane("unrolls")
        self._senders = [
            plane.sender(learner, Tag.UNROLL, self._buffers[i], synchronous=True)
            for i in range(credits)
        ]
        self._free = deque(range(credits))
        self._in_flight: deque[int] = deque()
        self._pending: deque[npt.NDArray[np.uint8]] = deque()

    def put(self, unrolls: npt.NDArray[np.uint8]) -> None:
        """Queue unrolls `<uint8>[n, nbytes]` and send as many as there are credits."""
        self._pending.extend(unrolls)
        self.pump()

    def pump(self) -> None:
        """Send what the credits allow."""
        while self._in_flight and self._senders[self._in_flight[0]].done():
            self._free.append(self._in_flight.popleft())
        while self._pending and self._free:
            index = self._free.popleft()
            self._buffers[index] = self._pending.popleft()
            self._senders[index].start()
            self._in_flight.append(index)

    @property
    def blocked(self) -> bool:
        """Whether unrolls wait for credits: the learner side is slower."""
        return bool(self._pending)

    def abandon(self) -> int:
        """Drop what was not sent yet; return how many unrolls."""
        dropped = len(self._pending)
        self._pending.clear()
        return dropped

    @property
    def in_flight(self) -> int:
        """Sends that the learner hasn't matched yet."""
        self.pump()
        return len(self._in_flight)


class UnrollInbox:
    """The learner's on-policy queue: receive slots filled in order of arrival.

    MPI fills the slots of one source in the order in which they were posted, but reports those
    that it filled meanwhile in the order of their indices. So the order of posting decides.

    Args:
      link: this rank's link.
      sources: ranks that send unrolls.
      layout: the unroll message.
      slots_per_source: receives posted for each source, at least 1.
    """

    def __init__(self, link: Link, sources: Sequence[int], layout: Layout, slots_per_source: int):
        self.buffers = layout.buffer(len(sources) * slots_per_source)
        self.views = layout.views(self.buffers)
        self._receivers = link.plane("unrolls").receivers(
            [
                Incoming(source, Tag.UNROLL, self.buffers[i * slots_per_source + j])
                for i, source in enumerate(sources)
                for j in range(slots_per_source)
            ]
        )
        self._arrived: deque[int] = deque()
        self._slots_per_source = slots_per_source
        self._posted: list[deque[int]] = [deque() for _ in sources]
        self._filled = np.zeros(len(self.buffers), bool)
        for slot in range(len(self.buffers)):
            self._post(slot)

    def _post(self, slot: int) -> None:
        self._filled[slot] = False
        self._posted[slot // self._slots_per_source].append(slot)
        self._receivers.start(slot)

    def poll(self) -> bool:
        """Take note of arrived unrolls; return whether there were any."""
        filled = list(self._receivers.poll())
        self._filled[filled] = True
        before = len(self._arrived)
        for source in dict.fromkeys(slot // self._slots_per_source for slot in filled):
            posted = self._posted[source]
            while posted and self._filled[posted[0]]:
                self._arrived.append(posted.popleft())
        return len(self._arrived) > before

    def __len__(self) -> int:
        return len(self._arrived)

    @property
    def fill(self) -> float:
        """Share of the slots that hold an unroll."""
        return len(self._arrived) / len(self.buffers)

    def first(self, count: int) -> npt.NDArray[np.intp]:
        """Return the oldest slots, up to `count` of them, without taking them."""
        return np.array(list(islice(self._arrived, count)), np.intp)

    def first_of_each(self, counts: Sequence[int]) -> npt.NDArray[np.intp]:
        """Return the oldest slots of each source, up to its count, without taking them."""
        left, slots = list(counts), []
        for slot in self._arrived:
            source = slot // self._slots_per_source
            if left[source]:
                left[source] -= 1
                slots.append(slot)
        return np.array(slots, np.intp)

    def take(self, count: int) -> npt.NDArray[np.intp]:
        """Return the oldest `count` slots; `release` them once they were copied."""
        return np.array([self._arrived.popleft() for _ in range(count)], np.intp)

    def remove(self, slots: npt.NDArray[np.intp]) -> None:
        """Take these arrived slots; `release` them once they were copied."""
        taken = set(slots.tolist())
        self._arrived = deque(slot for slot in self._arrived if slot not in taken)

    def release(self, slots: npt.NDArray[np.intp]) -> None:
        """Post the receives of `slots` again."""
        for slot in slots:
            self._post(int(slot))

    def discard(self) -> int:
        """Throw away what has arrived and post its slots again; return how many unrolls."""
        self.poll()
        dropped = len(self._arrived)
        self.release(self.take(dropped))
        return dropped

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()
