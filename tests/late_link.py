"""A link whose messages leave late: a send's buffer is read only when the test lets it go.

What MPI may do with a large message. A sender that reuses a buffer too early, or a receiver
that reads one too early, shows here and not on the loopback, which copies at once.
"""

from collections import defaultdict, deque

import numpy as np

from hpcrl.timing import Waiter


class LateNet:
    """All ranks' messages."""

    def __init__(self):
        self.on_the_way = []
        self.posted = defaultdict(deque)
        self.arrived = defaultdict(list)

    def link(self, rank):
        return LateLink(self, rank)

    def deliver(self, rng, most):
        """Complete up to `most` matched messages, first come first served on each address."""
        for _ in range(most):
            heads: dict[tuple, LateSender] = {}
            for sender in self.on_the_way:
                heads.setdefault(sender.address, sender)
            ready = [sender for address, sender in heads.items() if self.posted[address]]
            if not ready:
                return
            sender = ready[rng.integers(len(ready))]
            receivers, index = self.posted[sender.address].popleft()
            assert (sender.buffer == sender.sent).all(), "a buffer was reused too early"
            receivers.buffers[index][: len(sender.buffer)] = sender.buffer
            self.arrived[id(receivers)].append(index)
            self.on_the_way.remove(sender)
            sender.in_flight = False


class LateLink:
    label = "late"
    wait_policy = "spin"
    lost_ranks: frozenset[int] = frozenset()

    def __init__(self, net, rank):
        self.net, self.rank = net, rank

    def plane(self, name):
        return LatePlane(self.net, name, self.rank)

    def waiter(self, describe, deadline_s=None):
        return Waiter("spin", 0.2, describe)


class LatePlane:
    def __init__(self, net, name, rank):
        self.net, self.name, self.rank = net, name, rank

    def receivers(self, incoming):
        return LateReceivers(self.net, self.name, self.rank, incoming)

    def sender(self, dest, tag, buffer, *, synchronous=False):
        return LateSender(self.net, (self.name, self.rank, dest, tag), buffer)


class LateReceivers:
    def __init__(self, net, plane, rank, incoming):
        self.net = net
        self.buffers = [i.buffer for i in incoming]
        self.addresses = [(plane, i.source, rank, i.tag) for i in incoming]
        self.pending = set()

    def start(self, index):
        assert index not in self.pending, "posted twice"
        self.pending.add(index)
        self.net.posted[self.addresses[index]].append((self, index))

    def poll(self):
        # By index, as MPI_Testsome reports them, not in the order of arrival.
        complete = sorted(self.net.arrived.pop(id(self), []))
        self.pending.difference_update(complete)
        return complete

    def cancel(self):
        self.pending.clear()


class LateSender:
    def __init__(self, net, address, buffer):
        self.net, self.address, self.buffer = net, address, buffer
        assert isinstance(buffer, np.ndarray)
        self.in_flight = False

    def start(self):
        assert not self.in_flight, "started again while in flight"
        self.in_flight = True
        self.sent = self.buffer.copy()
        self.net.on_the_way.append(self)

    def done(self):
        return not self.in_flight
