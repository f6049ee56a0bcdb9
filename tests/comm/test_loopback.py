"""The in-process link: MPI's rules, and the end of all ranks when one fails."""

import numpy as np
import pytest

from hpcrl.comm.link import Incoming, wait_until
from hpcrl.comm.loopback import PeerFailedError, World
from tests.link_bodies import BODIES, a_collective_deadline_names_the_collective
from tests.loopback_runner import run_loopback


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_link_rule(body, size):
    run_loopback(body, size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_collective_deadline_names_the_collective(size):
    run_loopback(a_collective_deadline_names_the_collective, size, deadline_s=0.1)


def test_a_failing_rank_ends_the_waits_of_all_others():
    ended = []

    def body(link):
        group = link.group([1, 2])
        if link.rank == 0:
            raise KeyError("rank 0 is broken")
        try:
            if link.rank == 1:
                group.barrier()
            else:
                receivers = link.plane("steps").receivers([Incoming(0, 1, np.zeros(4, np.uint8))])
                receivers.start(0)
                wait_until(lambda: bool(receivers.poll()), link.waiter(lambda: "rank 2"))
        except PeerFailedError as error:
            ended.append((link.rank, repr(error.__cause__)))
            raise

    with pytest.raises(KeyError, match="rank 0 is broken"):
        run_loopback(body, 3)
    assert sorted(ended) == [(rank, "KeyError('rank 0 is broken')") for rank in (1, 2)]


def test_a_message_that_is_too_long_is_an_error():
    world = World(2)
    world.link(0).plane("steps").sender(1, 1, np.zeros(5, np.uint8)).start()
    receivers = world.link(1).plane("steps").receivers([Incoming(0, 1, np.zeros(4, np.uint8))])
    receivers.start(0)
    with pytest.raises(ValueError, match="5 bytes is longer than its buffer 4"):
        receivers.poll()


def test_a_send_in_flight_cannot_be_started_again():
    world = World(2)
    sender = world.link(0).plane("steps").sender(1, 1, np.zeros(5, np.uint8), synchronous=True)
    sender.start()
    with pytest.raises(RuntimeError, match="started again"):
        sender.start()


def test_the_sender_may_reuse_its_buffer_once_done():
    world = World(2)
    buffer, slot = np.array([1], np.uint8), np.zeros(1, np.uint8)
    sender = world.link(0).plane("steps").sender(1, 1, buffer)
    sender.start()
    assert sender.done()
    buffer[:] = 2
    receivers = world.link(1).plane("steps").receivers([Incoming(0, 1, slot)])
    receivers.start(0)
    assert list(receivers.poll()) == [0]
    assert slot.tolist() == [1]
