"""Unrolls on their way: credits bound them, none is lost, doubled or torn."""

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.comm.loopback import World
from hpcrl.comm.unroll_flow import UnrollInbox, UnrollOutbox
from hpcrl.comm.wire import Layout
from hpcrl.specs import ArraySpec
from tests.late_link import LateNet

LAYOUT = Layout("unroll", {"number": ArraySpec((), "int64"), "body": ArraySpec((40,), "int64")})


def unrolls(*numbers):
    """Messages that tell their number in every word."""
    buffers = LAYOUT.buffer(len(numbers))
    views = LAYOUT.views(buffers)
    views["number"][:] = numbers
    views["body"][:] = np.array(numbers)[:, None]
    return buffers


def taken(inbox, count):
    """Take unrolls, check that none is torn, and release their slots; return the numbers."""
    slots = inbox.take(count)
    numbers = inbox.views["number"][slots].tolist()
    for slot, number in zip(slots, numbers, strict=True):
        assert (inbox.views["body"][slot] == number).all()
    inbox.release(slots)
    return numbers


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    sources=st.integers(1, 3),
    credits=st.integers(1, 3),
    slots=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_random_schedules_neither_lose_nor_double_nor_tear_nor_exceed_the_credits(
    data, sources, credits, slots, seed
):
    net, rng = LateNet(), np.random.default_rng(seed)
    outboxes = [UnrollOutbox(net.link(1 + i), 0, LAYOUT, credits) for i in range(sources)]
    inbox = UnrollInbox(net.link(0), range(1, 1 + sources), LAYOUT, slots)
    put: list[deque[int]] = [deque() for _ in outboxes]
    next_number = 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["put", "deliver", "take", "pump"]))
        source = data.draw(st.integers(0, sources - 1))
        if action == "put":
            numbers = range(next_number, next_number + data.draw(st.integers(1, 3)))
            next_number = numbers.stop
            tagged = [1000 * source + n for n in numbers]
            put[source].extend(tagged)
            outboxes[source].put(unrolls(*tagged))
        elif action == "deliver":
            net.deliver(rng, data.draw(st.integers(1, 4)))
        elif action == "take":
            inbox.poll()
            for number in taken(inbox, data.draw(st.integers(0, len(inbox)))):
                assert put[number // 1000].popleft() == number
        else:
            outboxes[source].pump()
        for index, outbox in enumerate(outboxes):
            sends = [sender for sender in net.on_the_way if sender.address[1] == 1 + index]
            assert len(sends) <= credits
            assert outbox.blocked or len(put[index]) <= credits + slots
        assert len(inbox) <= sources * slots
    for _ in range(next_number + 1):
        for outbox in outboxes:
            outbox.pump()
        net.deliver(rng, 4)
        inbox.poll()
        for number in taken(inbox, len(inbox)):
            assert put[number // 1000].popleft() == number
    assert not any(put)
    for outbox in outboxes:
        assert not outbox.blocked
        assert outbox.in_flight == 0
        assert outbox.abandon() == 0


def test_acting_is_held_back_until_the_learner_matches_a_send():
    world = World(2)
    inbox = UnrollInbox(world.link(0), [1], LAYOUT, slots_per_source=2)
    outbox = UnrollOutbox(world.link(1), 0, LAYOUT, credits=2)
    outbox.put(unrolls(0, 1))
    assert not outbox.blocked
    outbox.put(unrolls(2))
    assert outbox.blocked
    # The learner has two slots: it matches two sends, which gives their credits back.
    inbox.poll()
    assert inbox.fill == 1.0
    outbox.put(unrolls(3, 4))
    assert outbox.blocked
    assert outbox.in_flight == 2
    assert taken(inbox, 2) == [0, 1]
    inbox.poll()
    assert outbox.in_flight == 1  # 4 is on its way now
    assert not outbox.blocked
    assert taken(inbox, 2) == [2, 3]


def test_what_was_not_sent_can_be_abandoned_and_what_arrived_be_discarded():
    world = World(2)
    inbox = UnrollInbox(world.link(0), [1], LAYOUT, slots_per_source=1)
    outbox = UnrollOutbox(world.link(1), 0, LAYOUT, credits=2)
    outbox.put(unrolls(*range(6)))
    assert outbox.abandon() == 4
    assert not outbox.blocked
    dropped = 0
    for _ in range(2):
        dropped += inbox.discard()
        outbox.pump()
    assert outbox.in_flight == 0
    dropped += inbox.discard()
    assert dropped == 2
    assert len(inbox) == 0
    outbox.put(unrolls(9))
    inbox.poll()
    assert taken(inbox, 1) == [9]


def test_unrolls_put_are_copies():
    net = LateNet()
    inbox = UnrollInbox(net.link(0), [1], LAYOUT, 1)
    outbox = UnrollOutbox(net.link(1), 0, LAYOUT, 1)
    mine = unrolls(5)
    outbox.put(mine)
    mine[:] = 0
    net.deliver(np.random.default_rng(0), 1)
    inbox.poll()
    assert taken(inbox, 1) == [5]
