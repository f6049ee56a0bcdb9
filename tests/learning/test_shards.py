"""A shard takes gradients as its optimizer is written down, and none that is too old."""

import numpy as np
import pytest
import torch

from hpcrl.comm.gradient_flow import Fate, GradientExchange, GradientInbox
from hpcrl.comm.loopback import World
from hpcrl.comm.wire import gradient_layout, parameters_layout
from hpcrl.config.sections import OptimizerConfig
from hpcrl.learning.data_parallel import SingleLearner
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.shards import MODEL, Shard, cut, join, step_count_of
from hpcrl.topology.shards import shard_bounds
from tests.small import brain_of, env_spec


def shard_of(value, max_lag=3, **config):
    return Shard(torch.tensor(value, dtype=torch.float32), OptimizerConfig(**config), 100, max_lag)


def rmsprop_by_hand(value, gradients, rate, alpha, epsilon):
    second = np.zeros_like(value)
    for gradient in gradients:
        second = alpha * second + (1 - alpha) * gradient**2
        value = value - rate * gradient / (np.sqrt(second) + epsilon)
    return value


def adam_by_hand(value, gradients, rate, beta1, beta2, epsilon):
    first, second = np.zeros_like(value), np.zeros_like(value)
    for t, gradient in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        root = np.sqrt(second / (1 - beta2**t)) + epsilon
        value = value - rate * first / (1 - beta1**t) / root
    return value


@pytest.mark.parametrize("name", ["rmsprop", "adam"])
def test_a_gradient_is_the_optimizers_step_and_is_not_clipped_again(name):
    start = np.array([1.0, -2.0, 0.5])
    gradients = [np.array([30.0, -40.0, 0.1]), np.array([-1.0, 2.0, 3.0]), np.array([0.0, 5.0, 1])]
    settings = {"learning_rate": 0.01, "epsilon": 1e-3, "max_grad_norm": 1.0}
    shard = shard_of(start, name=name, **settings)
    for version, gradient in enumerate(gradients):
        taken = shard.take(gradient.astype(np.float32), version, 0)
        assert taken == (True, 0)
    want = (
        rmsprop_by_hand(start, gradients, 0.01, 0.99, 1e-3)
        if name == "rmsprop"
        else adam_by_hand(start, gradients, 0.01, 0.9, 0.999, 1e-3)
    )
    np.testing.assert_allclose(shard.parameters, want, rtol=1e-5)
    assert shard.version == 3


def test_the_learning_rate_follows_the_steps_that_were_trained_on():
    shard = shard_of([0.0], name="adam", learning_rate=0.1, schedule="linear")
    assert shard.learning_rate(0) == pytest.approx(0.1)
    assert shard.learning_rate(75) == pytest.approx(0.025)
    before = shard.parameters.copy()
    shard.take(np.ones(1, np.float32), 0, 100)  # where the rate has reached 0
    np.testing.assert_array_equal(shard.parameters, before)


def test_a_gradient_at_the_bound_is_taken_and_one_beyond_it_changes_nothing():
    shard = shard_of([0.0], max_lag=2)
    for version in range(3):
        shard.take(np.ones(1, np.float32), version, 0)
    assert shard.take(np.ones(1, np.float32), 1, 0) == (True, 2)
    before, version = shard.parameters.copy(), shard.version
    state = shard.state()
    assert shard.take(np.ones(1, np.float32), 1, 0) == (False, 3)
    np.testing.assert_array_equal(shard.parameters, before)
    assert shard.version == version
    for name, array in shard.state().arrays.items():
        np.testing.assert_array_equal(array, state.arrays[name])


class Bench:
    """Two workers and two servers in one thread; every message moves when it is told to."""

    def __init__(self, max_lag):
        world = World(4)
        sizes = [last - first for first, last in shard_bounds(5, 2)]
        gradients = [gradient_layout(size, ("entropy",)) for size in sizes]
        answers = [parameters_layout(size) for size in sizes]
        self.shards = [shard_of(np.zeros(size), max_lag) for size in sizes]
        self.inboxes = [
            GradientInbox(world.link(i), (2, 3), gradients[i], answers[i]) for i in range(2)
        ]
        self.workers = [
            GradientExchange(world.link(2 + i), (0, 1), gradients, answers) for i in range(2)
        ]
        self.seen = []

    def serve(self):
        """Each server takes in what has arrived."""
        for server, (shard, inbox) in enumerate(zip(self.shards, self.inboxes, strict=True)):
            for index in inbox.poll():
                arrived = inbox.arrived(index)
                applied, lag = False, 0
                if arrived.num_steps:
                    applied, lag = shard.take(arrived.gradient, arrived.version, 0)
                    self.seen.append((server, index, arrived.version, lag, applied))
                inbox.answer(index, shard.parameters, shard.version, lag, applied)

    def ask(self, worker):
        self.workers[worker].ask()
        self.serve()
        return self.workers[worker].poll()

    def send(self, worker, gradient=None):
        gradient = np.ones(5, np.float32) if gradient is None else gradient
        figures = {"loss": 0.0, "grad_norm": 1.0}
        self.workers[worker].send(gradient, 7, figures, {"entropy": 0.5})

    def step(self, worker):
        self.send(worker)
        self.serve()
        return self.workers[worker].poll()


def test_lag_is_what_a_schedule_of_two_workers_makes_it():
    bench = Bench(max_lag=3)
    assert bench.ask(0) is not None
    assert bench.ask(1) is not None
    for _ in range(2):
        bench.step(0)
    assert bench.workers[0].fate == Fate(2, 0, 0, 0)
    # The other worker's copy is two versions old on both shards.
    bench.step(1)
    assert bench.workers[1].fate == Fate(applied=2, dropped=0, lag_sum=4, lag_max=2)
    # Now it is up to date, and the first worker is one behind.
    bench.step(0)
    assert bench.workers[0].fate == Fate(2, 0, 2, 1)
    assert [shard.version for shard in bench.shards] == [4, 4]
    for _ in range(3):
        bench.step(0)
    # Four versions behind: beyond the bound on both shards, and fresh parameters come with it.
    parameters = bench.step(1)
    assert bench.workers[1].fate == Fate(0, 2, 0, 0)
    want = np.concatenate([shard.parameters for shard in bench.shards])
    np.testing.assert_array_equal(parameters, want)
    assert bench.workers[1].versions.tolist() == [7, 7]
    bench.step(1)
    assert bench.workers[1].fate == Fate(2, 0, 0, 0)


def test_each_shard_counts_the_lag_by_its_own_versions():
    bench = Bench(max_lag=1)
    # The second server is ahead, and gets further ahead while the gradient is under way.
    for version in range(5):
        bench.shards[1].take(np.ones(3, np.float32), version, 0)
    bench.ask(0)
    assert bench.workers[0].versions.tolist() == [0, 5]
    bench.step(0)
    assert bench.workers[0].fate == Fate(2, 0, 0, 0)
    for version in (6, 7):
        bench.shards[1].take(np.ones(3, np.float32), version, 0)
    bench.step(0)
    assert bench.workers[0].fate == Fate(applied=1, dropped=1, lag_sum=0, lag_max=0)
    assert bench.workers[0].versions.tolist() == [2, 8]


def test_each_server_gets_its_shard_and_nobody_waits_for_the_other_worker():
    bench = Bench(max_lag=100)
    bench.ask(0)
    bench.ask(1)
    bench.send(1)  # on its way while the other worker goes on
    for count in range(5):
        bench.workers[0].send(
            np.arange(5, dtype=np.float32) + count,
            3,
            {"loss": 1.5, "grad_norm": 2.0},
            {"entropy": 0.25},
        )
        if count == 0:
            for inbox in bench.inboxes:
                arrived = [inbox.arrived(i) for i in inbox.poll() if i == 0]
                shard = arrived[0].gradient
                edges = (0, 2) if len(shard) == 2 else (2, 5)
                np.testing.assert_array_equal(shard, np.arange(*edges))
                assert arrived[0].figures == {"loss": 1.5, "grad_norm": 2.0}
                assert arrived[0].metrics == {"entropy": 0.25}
                taken = bench.shards[0 if len(shard) == 2 else 1]
                applied, lag = taken.take(shard, arrived[0].version, 0)
                inbox.answer(0, taken.parameters, taken.version, lag, applied)
        bench.serve()
        assert bench.workers[0].poll() is not None
    assert [shard.version for shard in bench.shards] == [5, 5]
    assert bench.workers[1].waits_for() == [0, 1]


@pytest.mark.parametrize("name", ["rmsprop", "adam"])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_a_checkpoint_of_three_shards_goes_on_with_any_number(name, servers):
    env = env_spec()
    brain = brain_of(env)
    whole = FlatParameters(brain.make_network(1))
    size = whole.value.numel()
    config = OptimizerConfig(name=name, learning_rate=0.01)
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(6, size)).astype(np.float32)

    def shards(count):
        return [Shard(whole.value[a:b], config, 100, 10) for a, b in shard_bounds(size, count)]

    def train(parts, some, first_version):
        bounds = shard_bounds(size, len(parts))
        for number, gradient in enumerate(some):
            for part, (a, b) in zip(parts, bounds, strict=True):
                part.take(gradient[a:b], first_version + number, 0)
        return np.concatenate([part.parameters for part in parts])

    unbroken = shards(1)
    want = train(unbroken, gradients, 0)
    before = shards(3)
    train(before, gradients[:4], 0)
    tensors, state = join(whole, [part.state() for part in before], shard_bounds(size, 3))
    fresh = FlatParameters(brain.make_network(9))
    after = shards(servers)
    for part, bounds in zip(after, shard_bounds(size, servers), strict=True):
        part.load_state(cut(fresh, tensors, state, bounds, version=4))
    got = train(after, gradients[4:], 4)
    padding = whole.value.numpy() == 0  # gaps between parameters, which no checkpoint holds
    np.testing.assert_array_equal(got[~padding], want[~padding])


def test_a_checkpoint_of_shards_is_one_that_a_trainer_reads():
    from hpcrl.learning.trainer import Trainer
    from tests.acting_tools import CPU
    from tests.small import config_of

    brain = brain_of(env_spec())
    learner = config_of().learner
    whole = FlatParameters(brain.make_network(3))
    shard = Shard(whole.value, learner.optimizer, 100, 10)
    tensors, _ = join(whole, [shard.state()], [(0, whole.value.numel())])
    trainer = Trainer(brain, learner, SingleLearner(), CPU, 100, seed=1)
    trainer.load_state(tensors)
    np.testing.assert_array_equal(trainer.parameters(), whole.value.numpy())


def test_another_networks_checkpoint_is_refused():
    brain, other = brain_of(env_spec()), brain_of(env_spec(), network={"hidden_sizes": [9]})
    whole = FlatParameters(other.make_network(1))
    bounds = [(0, whole.value.numel())]
    shard = Shard(whole.value, OptimizerConfig(), 100, 10)
    tensors, state = join(whole, [shard.state()], bounds)
    with pytest.raises(ValueError, match="the checkpoint is of another network"):
        cut(FlatParameters(brain.make_network(1)), tensors, state, bounds[0], 0)


def test_a_shard_cut_from_several_has_the_mean_of_their_optimizer_steps():
    records = [
        {"first": 0, "last": 10, "step_count": 100},
        {"first": 10, "last": 20, "step_count": 106},
    ]
    assert step_count_of(records, (0, 10)) == 100
    assert step_count_of(records, (10, 20)) == 106
    assert step_count_of(records, (0, 20)) == 103
    assert step_count_of(records, (8, 14)) == 104  # 2 of 100 and 4 of 106


def test_moments_are_named_after_the_optimizers():
    assert shard_of([0.0], name="adam").moments == ("second_moment", "first_moment")
    assert set(shard_of([0.0], name="rmsprop").state().arrays) == {MODEL, "second_moment"}
