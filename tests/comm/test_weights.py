"""Weights: whole, versioned, the latest only, and never a wait for the learner."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.comm.loopback import World
from hpcrl.comm.weights import WeightsPublisher, WeightsSubscriber
from tests.late_link import LateNet
from tests.loopback_runner import run_loopback

SIZE = 100


class Learner:
    """Parameters that all hold their version; stepping writes over them in place."""

    def __init__(self, link, clients):
        self.publisher = WeightsPublisher(link, clients, SIZE)
        self.parameters = np.zeros(SIZE, np.float32)
        self.version = 0
        self.copies = 0

    def step(self):
        self.version += 1
        self.parameters[:] = self.version

    def read(self):
        self.copies += 1
        return self.parameters

    def serve(self):
        self.publisher.serve(self.read, self.version)


def receive(subscriber):
    """Newer weights' version, after a check that they are whole; None if there are none."""
    parameters = subscriber.poll()
    if parameters is None:
        return None
    assert parameters.shape == (SIZE,)
    assert (parameters == subscriber.version).all(), "torn weights"
    subscriber.renew()
    return subscriber.version


@settings(max_examples=80, deadline=None)
@given(data=st.data(), clients=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_trap28_weights_arrive_whole_and_in_order_whatever_the_delays(data, clients, seed):
    net, rng = LateNet(), np.random.default_rng(seed)
    learner = Learner(net.link(0), range(1, 1 + clients))
    subscribers = [WeightsSubscriber(net.link(1 + i), 0, SIZE) for i in range(clients)]
    versions: list[list[int]] = [[] for _ in subscribers]
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["step", "serve", "deliver", "poll"]))
        if action == "step":
            learner.step()
        elif action == "serve":
            learner.serve()
        elif action == "deliver":
            net.deliver(rng, data.draw(st.integers(1, 3)))
        else:
            index = data.draw(st.integers(0, clients - 1))
            version = receive(subscribers[index])
            versions[index] += [] if version is None else [version]
        # A request and a copy at most are on their way to or from each client.
        assert len(net.on_the_way) <= 2 * clients
    for seen in versions:
        assert seen == sorted(set(seen))
    for _ in range(4 * clients):
        learner.serve()
        net.deliver(rng, 10)
        for subscriber in subscribers:
            receive(subscriber)
    assert [subscriber.version for subscriber in subscribers] == [learner.version] * clients


def test_versions_are_skipped_and_the_latest_comes():
    world = World(2)
    learner = Learner(world.link(0), [1])
    subscriber = WeightsSubscriber(world.link(1), 0, SIZE)
    learner.serve()
    assert receive(subscriber) == 0
    for _ in range(5):
        learner.step()
    learner.serve()
    assert receive(subscriber) == 5
    learner.serve()
    assert receive(subscriber) is None  # nothing newer


def test_weights_are_copied_only_for_a_client_that_lacks_them():
    world = World(3)
    learner = Learner(world.link(0), [1, 2])
    subscribers = [WeightsSubscriber(world.link(rank), 0, SIZE) for rank in (1, 2)]
    for _ in range(10):
        learner.serve()
    assert learner.copies == 1  # one snapshot serves both
    for subscriber in subscribers:
        receive(subscriber)
    for _ in range(10):
        learner.serve()
    assert learner.copies == 1


def test_a_slow_receiver_holds_up_neither_the_learner_nor_the_others():
    net, rng = LateNet(), np.random.default_rng(0)
    learner = Learner(net.link(0), [1, 2])
    slow, fast = (WeightsSubscriber(net.link(rank), 0, SIZE) for rank in (1, 2))
    net.deliver(rng, 2)
    learner.serve()
    stuck = next(s for s in net.on_the_way if s.address[2] == 1)
    net.on_the_way.remove(stuck)  # the slow one's copy of version 0 stays on its way
    got = []
    for _ in range(12):
        learner.step()
        learner.serve()
        net.deliver(rng, 4)
        version = receive(fast)
        got += [] if version is None else [version]
    assert got[-1] >= 11
    assert slow.poll() is None
    assert not learner.publisher.idle()
    net.on_the_way.insert(0, stuck)
    net.deliver(rng, 4)
    assert receive(slow) == 0  # still whole, though twelve steps went over the parameters
    assert learner.publisher.idle()


def test_versions_go_on_from_a_resumed_learners():
    world = World(2)
    learner = Learner(world.link(0), [1])
    learner.version = 1200
    learner.parameters[:] = 1200
    subscriber = WeightsSubscriber(world.link(1), 0, SIZE)
    learner.serve()
    assert receive(subscriber) == 1200


@pytest.mark.parametrize("clients", [1, 3])
def test_every_client_ends_with_the_last_version_while_the_learner_steps_on(clients):
    def body(link):
        if link.rank:
            subscriber = WeightsSubscriber(link, 0, SIZE)
            waiter = link.waiter(lambda: "waited for weights")
            while subscriber.version < 200:
                if receive(subscriber) is None:
                    waiter.idle()
                    link.world.check()
            return subscriber.version
        learner = Learner(link, range(1, 1 + clients))
        for _ in range(200):
            learner.step()
            learner.serve()
        waiter = link.waiter(lambda: "waited for the clients")
        while any(learner.publisher._have < 200):
            learner.serve()
            waiter.idle()
        return learner.version

    assert run_loopback(body, 1 + clients, 20.0) == [200] * (1 + clients)
