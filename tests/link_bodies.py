"""What every link must do, written once: run over threads and over real MPI ranks.

Each body is called on all ranks of a link of two or more ranks and ends with all of its
messages received.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcrl.comm.agreement import Agreement
from hpcrl.comm.link import Incoming, Link, wait_until
from hpcrl.timing import DeadlineError

PART_BYTES = 1000
"""MPI links under test split messages that are longer."""
GUARD = np.uint8(0xA5)
GUARD_BYTES = 64


class Guarded:
    """A receive buffer inside a pattern that no message may touch."""

    def __init__(self, nbytes: int):
        self._all = np.full(nbytes + 2 * GUARD_BYTES, GUARD)
        self.buffer = self._all[GUARD_BYTES : GUARD_BYTES + nbytes]
        self.buffer[:] = 0

    def check(self) -> None:
        assert (self._all[:GUARD_BYTES] == GUARD).all(), "written before the buffer"
        assert (self._all[len(self._all) - GUARD_BYTES :] == GUARD).all(), "written after it"


def wait(link: Link, done: Callable[[], Any], what: str) -> None:
    wait_until(lambda: bool(done()), link.waiter(lambda: f"rank {link.rank} waited for {what}"))


def completions(link: Link, receivers, number: int) -> list[int]:
    """Poll until `number` receives completed."""
    complete: list[int] = []

    def enough() -> bool:
        complete.extend(receivers.poll())
        return len(complete) >= number

    wait(link, enough, f"{number} messages")
    assert len(complete) == number
    return complete


def payload(nbytes: int, *key: int) -> np.ndarray:
    """Bytes that tell which message they are."""
    return np.random.default_rng(key).integers(0, 256, nbytes, np.uint8)


def send(link: Link, plane: str, dest: int, tag: int, data: np.ndarray) -> None:
    sender = link.plane(plane).sender(dest, tag, data.copy())
    sender.start()
    wait(link, sender.done, "its send")


def receive(link: Link, plane: str, source: int, tag: int, nbytes: int) -> np.ndarray:
    slot = Guarded(nbytes)
    receivers = link.plane(plane).receivers([Incoming(source, tag, slot.buffer)])
    receivers.start(0)
    completions(link, receivers, 1)
    slot.check()
    return slot.buffer


def say_go(link: Link, dest: int) -> None:
    send(link, "control", dest, 5, np.ones(1, np.uint8))


def await_go(link: Link, source: int) -> None:
    assert receive(link, "control", source, 5, 1)[0] == 1


def stays_false(done: Callable[[], Any]) -> bool:
    return not any(done() for _ in range(300))


def messages_of_one_sender_arrive_in_order(link: Link) -> None:
    if link.rank == 0:
        for number in range(20):
            send(link, "steps", 1, 3, payload(200, number))
    elif link.rank == 1:
        for number in range(20):
            assert (receive(link, "steps", 0, 3, 200) == payload(200, number)).all()


def receives_are_filled_in_the_order_in_which_they_were_posted(link: Link) -> None:
    order = [2, 0, 3, 1]
    if link.rank == 0:
        await_go(link, 1)
        for number in range(len(order)):
            send(link, "steps", 1, 3, payload(50, number))
    elif link.rank == 1:
        slots = [Guarded(50) for _ in order]
        receivers = link.plane("steps").receivers([Incoming(0, 3, s.buffer) for s in slots])
        for index in order:
            receivers.start(index)
        say_go(link, 0)
        assert sorted(completions(link, receivers, len(order))) == [0, 1, 2, 3]
        for number, index in enumerate(order):
            assert (slots[index].buffer == payload(50, number)).all()
            slots[index].check()


def a_receive_that_is_not_posted_is_never_filled(link: Link) -> None:
    if link.rank == 0:
        first = link.plane("steps").sender(1, 3, payload(50, 0))
        second = link.plane("steps").sender(1, 3, payload(50, 1))
        first.start()
        second.start()
        wait(link, lambda: first.done() and second.done(), "its sends")
    elif link.rank == 1:
        slots = [Guarded(50), Guarded(50)]
        receivers = link.plane("steps").receivers([Incoming(0, 3, s.buffer) for s in slots])
        receivers.start(1)
        assert completions(link, receivers, 1) == [1]
        assert stays_false(receivers.poll)
        assert not slots[0].buffer.any()
        receivers.start(1)
        assert completions(link, receivers, 1) == [1]
        assert (slots[1].buffer == payload(50, 1)).all()


def planes_and_tags_and_sources_do_not_mix(link: Link) -> None:
    addresses = [(plane, tag) for plane in ("steps", "weights") for tag in (1, 2)]
    if link.rank > 0:
        for plane, tag in reversed(addresses):
            send(link, plane, 0, tag, payload(40, link.rank, tag, len(plane)))
        return
    for source in range(link.size - 1, 0, -1):
        for plane, tag in addresses:
            data = receive(link, plane, source, tag, 40)
            assert (data == payload(40, source, tag, len(plane))).all()


def a_synchronous_send_is_done_only_when_it_is_matched(link: Link) -> None:
    if link.rank == 0:
        plane = link.plane("unrolls")
        credits = [plane.sender(1, 2, payload(30, n), synchronous=True) for n in range(2)]
        assert all(sender.done() for sender in credits)
        for sender in credits:
            sender.start()
        assert stays_false(credits[0].done)
        assert stays_false(credits[1].done)
        say_go(link, 1)
        wait(link, credits[0].done, "its first send")
        assert stays_false(credits[1].done)
        say_go(link, 1)
        wait(link, credits[1].done, "its second send")
    elif link.rank == 1:
        for number in range(2):
            await_go(link, 0)
            assert (receive(link, "unrolls", 0, 2, 30) == payload(30, number)).all()


def long_messages_arrive_whole_and_in_order(link: Link) -> None:
    sizes = [1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 5 * PART_BYTES + 7]
    dest, source = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for synchronous in (False, True):
        for nbytes in sizes:
            slots = [Guarded(nbytes), Guarded(nbytes)]
            receivers = link.plane("unrolls").receivers(
                [Incoming(source, 2, slot.buffer) for slot in slots]
            )
            receivers.start(1)
            receivers.start(0)
            senders = [
                link.plane("unrolls").sender(
                    dest, 2, payload(nbytes, link.rank, number), synchronous=synchronous
                )
                for number in range(2)
            ]
            for sender in senders:
                sender.start()
            assert sorted(completions(link, receivers, 2)) == [0, 1]
            for number, slot in enumerate(reversed(slots)):
                assert (slot.buffer == payload(nbytes, source, number)).all()
                slot.check()
            wait(link, lambda senders=senders: all(s.done() for s in senders), "its sends")


def a_short_message_leaves_the_rest_of_the_buffer_alone(link: Link) -> None:
    if link.rank == 0:
        send(link, "steps", 1, 3, payload(100, 1))
    elif link.rank == 1:
        data = receive(link, "steps", 0, 3, 300)
        assert (data[:100] == payload(100, 1)).all()
        assert not data[100:].any()


def a_cancelled_receive_takes_no_message(link: Link) -> None:
    if link.rank == 0:
        await_go(link, 1)
        send(link, "weights", 1, 4, payload(2 * PART_BYTES, 1))
        say_go(link, 1)
    elif link.rank == 1:
        slots = [Guarded(2 * PART_BYTES), Guarded(2 * PART_BYTES)]
        withdrawn = link.plane("weights").receivers([Incoming(0, 4, s.buffer) for s in slots])
        withdrawn.start(0)
        withdrawn.cancel()
        say_go(link, 0)
        await_go(link, 0)
        assert stays_false(withdrawn.poll)
        data = receive(link, "weights", 0, 4, 2 * PART_BYTES)
        assert (data == payload(2 * PART_BYTES, 1)).all()
        for slot in slots:
            assert not slot.buffer.any()
            slot.check()


def random_traffic_arrives_once_and_in_order(link: Link) -> None:
    """Every pair exchanges messages of random sizes through two receive slots each."""
    num_messages, max_bytes = 15, 3 * PART_BYTES
    others = [rank for rank in range(link.size) if rank != link.rank]

    def length(source: int, dest: int) -> int:
        return int(np.random.default_rng([source, dest]).integers(1, max_bytes))

    slots = {(source, i): Guarded(length(source, link.rank)) for source in others for i in (0, 1)}
    keys = list(slots)
    receivers = link.plane("steps").receivers(
        [Incoming(source, 9, slots[source, i].buffer) for source, i in keys]
    )
    for index in range(len(keys)):
        receivers.start(index)
    buffers = {dest: np.zeros(length(link.rank, dest), np.uint8) for dest in others}
    senders = {
        dest: link.plane("steps").sender(dest, 9, buffers[dest], synchronous=dest % 2 == 0)
        for dest in others
    }
    sent = dict.fromkeys(others, 0)
    received = dict.fromkeys(others, 0)
    ready: set[tuple[int, int]] = set()

    def step() -> bool:
        for dest in others:
            if sent[dest] < num_messages and senders[dest].done():
                buffers[dest][:] = payload(len(buffers[dest]), link.rank, dest, sent[dest])
                senders[dest].start()
                sent[dest] += 1
        ready.update(keys[index] for index in receivers.poll())
        for source in others:
            # The slots were posted in turn, so message n is in slot n % 2.
            while (slot := (source, received[source] % 2)) in ready:
                data = slots[slot].buffer
                expected = payload(len(data), source, link.rank, received[source])
                assert (data == expected).all()
                slots[slot].check()
                received[source] += 1
                ready.remove(slot)
                receivers.start(keys.index(slot))
        return all(n == num_messages for n in [*sent.values(), *received.values()])

    wait(link, step, "random traffic")
    wait(link, lambda: all(s.done() for s in senders.values()), "its last sends")
    receivers.cancel()


def a_deadline_names_the_wait(link: Link) -> None:
    if link.rank == 0:
        slot = np.zeros(10, np.uint8)
        receivers = link.plane("steps").receivers([Incoming(1, 3, slot)])
        receivers.start(0)
        waiter = link.waiter(lambda: "inference 0 (rank 0) waited for actor 1's step", 0.05)
        with pytest.raises(DeadlineError, match=r"inference 0 \(rank 0\) waited for actor 1's"):
            wait_until(lambda: bool(receivers.poll()), waiter)
        receivers.cancel()


def collectives_give_every_member_the_same(link: Link) -> None:
    group = link.group(range(link.size))
    assert group is not None
    assert (group.rank, group.size) == (link.rank, link.size)
    ranks = np.arange(link.size)
    for dtype in (np.float32, np.float64, np.int64):
        for op, expected in (
            ("sum", (ranks + 1).sum()),
            ("max", link.size),
            ("min", 1),
        ):
            array = np.array([link.rank + 1, 7], dtype)
            group.allreduce(array, op)
            assert array[0] == expected
            assert array[1] == (7 * link.size if op == "sum" else 7)
    stacked = group.allgather(np.array([[link.rank, 5]], np.uint64))
    assert stacked.dtype == np.uint64
    assert stacked.tolist() == [[[rank, 5]] for rank in range(link.size)]
    for root in range(link.size):
        for nbytes in (0, 1, 3 * PART_BYTES + 1):
            data = payload(nbytes, root).tobytes()
            assert group.broadcast(data if link.rank == root else None, root) == data
    group.barrier()


def a_group_holds_its_ranks_in_the_given_order(link: Link) -> None:
    ranks = list(range(link.size - 1, 0, -1))
    group = link.group(ranks)
    lonely = link.group([0])
    if link.rank == 0:
        assert group is None
        assert lonely is not None
        array = np.array([3.0])
        lonely.allreduce(array, "sum")
        assert array[0] == 3.0
        assert lonely.allgather(array).tolist() == [[3.0]]
    else:
        assert lonely is None
        assert group is not None
        assert group.rank == ranks.index(link.rank)
        assert group.allgather(np.array(link.rank)).tolist() == ranks
        assert group.broadcast(bytes([link.rank]), 0) == bytes([ranks[0]])


def an_all_gather_is_done_once_everyone_has_called(link: Link) -> None:
    group = link.group(range(link.size))
    assert group is not None
    last = link.size - 1
    if link.rank == last:
        await_go(link, 0)
    array = np.array([link.rank + 0.5])
    gathering = group.start_allgather(array)
    array[:] = -link.rank
    second = group.start_allgather(array)
    if link.rank == 0:
        assert stays_false(gathering.done)
        say_go(link, last)
    wait(link, second.done, "the second all-gather")
    wait(link, gathering.done, "the first all-gather")
    assert gathering.result.tolist() == [[rank + 0.5] for rank in range(link.size)]
    assert second.result.tolist() == [[-rank] for rank in range(link.size)]


def votes_end_alike_for_all(link: Link) -> None:
    group = link.group(range(link.size))
    assert group is not None
    agreement = Agreement(group, {"stop": "max", "ready": "min", "frames": "sum"})
    assert agreement.poll() is None
    random = np.random.default_rng(link.rank)
    for number in range(30):
        votes = np.random.default_rng([number, 1]).integers(0, 2**40, (link.size, 3))
        mine = dict(zip(("stop", "ready", "frames"), votes[link.rank].tolist(), strict=True))
        if random.random() < 0.5:
            outcome = agreement.vote(mine)
        else:
            agreement.start(mine)
            while (polled := agreement.poll()) is None:
                pass
            outcome = polled
        assert outcome == {
            "stop": votes[:, 0].max(),
            "ready": votes[:, 1].min(),
            "frames": votes[:, 2].sum(),
        }
        assert agreement.poll() is None


BODIES = [
    messages_of_one_sender_arrive_in_order,
    receives_are_filled_in_the_order_in_which_they_were_posted,
    a_receive_that_is_not_posted_is_never_filled,
    planes_and_tags_and_sources_do_not_mix,
    a_synchronous_send_is_done_only_when_it_is_matched,
    long_messages_arrive_whole_and_in_order,
    a_short_message_leaves_the_rest_of_the_buffer_alone,
    a_cancelled_receive_takes_no_message,
    random_traffic_arrives_once_and_in_order,
    a_deadline_names_the_wait,
    collectives_give_every_member_the_same,
    a_group_holds_its_ranks_in_the_given_order,
    an_all_gather_is_done_once_everyone_has_called,
    votes_end_alike_for_all,
]


def a_collective_deadline_names_the_collective(link: Link) -> None:
    """For a link whose deadline is a tenth of a second."""
    group = link.group(range(link.size))
    assert group is not None
    if link.rank == 0:
        with pytest.raises(DeadlineError, match=r"rank 0.*waited in a barrier: nothing for 0\."):
            group.barrier()
        for rank in range(1, link.size):
            say_go(link, rank)
    else:
        slot = np.zeros(1, np.uint8)
        receivers = link.plane("control").receivers([Incoming(0, 5, slot)])
        receivers.start(0)
        patient = link.waiter(lambda: "waited for rank 0", 60.0)
        wait_until(lambda: bool(receivers.poll()), patient)
        group.barrier()
