"""Several optimizer steps per batch: shares equal the whole, statistics are of all seen."""

import threading

import numpy as np
import pytest
import torch

from hpcrl.learning.data_parallel import SingleLearner, make_data_parallel
from hpcrl.learning.epochs import EpochTrainer
from hpcrl.learning.optim import FlatParameters
from hpcrl.timing import StageTimer
from tests.acting.test_policy import acted, batch_of
from tests.acting_tools import CPU
from tests.learning.test_trainer import columns_of
from tests.loopback_runner import run_loopback

STAGES = ("batch", "copy", "forward_backward", "all_reduce", "optimizer")
SIZE = 12


def one_at_a_time(stage):
    """Threads share torch's default random stream."""
    lock, make_network = threading.Lock(), stage.brain.make_network

    def locked(seed):
        with lock:
            return make_network(seed)

    stage.brain.make_network = locked


def stage_of(core="none", **agent):
    sections = {
        "layout": "sync",
        "agent": {"name": "ppo", "epochs": 2, "minibatches": 1, **agent},
        "learner": {"optimizer": {"max_grad_norm": 0.5, "learning_rate": 0.01}},
        "network": {"hidden_sizes": [8], "core": core, "core_size": 4},
    }
    stage = acted("scripted", steps=80, **sections)
    one_at_a_time(stage)
    return stage


def batch_for(stage):
    whole = batch_of(stage)
    return columns_of(whole, torch.arange(SIZE))


def trainer_of(stage, data_parallel=None):
    config = stage.brain._config.learner
    return EpochTrainer(stage.brain, config, data_parallel or SingleLearner(), CPU, 10_000, 1)


def train(trainer, batch, steps=2):
    results = [trainer.step(batch, 10 + i, 100 * i, StageTimer(STAGES)) for i in range(steps)]
    return trainer.parameters().copy(), results


@pytest.mark.parametrize(
    "agent",
    [
        {},
        {"normalize_observations": True},
        {"minibatch_over": "unrolls", "core": "lstm", "value_clip": 0.1},
    ],
)
def test_two_learners_with_half_the_batch_equal_one_with_all(agent):
    stage = stage_of(**agent)
    batch = batch_for(stage)
    ours, whole = train(trainer_of(stage), batch)

    def body(link):
        group = link.group(range(link.size))
        share = torch.arange(SIZE).chunk(link.size)[link.rank]
        trainer = trainer_of(stage, make_data_parallel("mpi", group, CPU, ["a", "a"]))
        return train(trainer, columns_of(batch, share))

    for theirs, results in run_loopback(body, 2):
        np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=2e-6)
        for one, other in zip(results, whole, strict=True):
            assert one.num_steps == other.num_steps
            for name, value in other.values.items():
                assert one.values[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_every_row_is_trained_on_once_per_epoch():
    stage = stage_of(minibatches=3, epochs=2)
    batch = batch_for(stage)
    seen: list[int] = []
    trainer = trainer_of(stage)
    update = trainer._update

    def noted(piece, *arguments):
        seen.extend(piece.behaviour["log_prob"].flatten().tolist())
        return update(piece, *arguments)

    trainer._update = noted
    _, results = train(trainer, batch, steps=1)
    real = batch.behaviour["log_prob"][:-1][~batch.final[:-1]].tolist()
    assert sorted(seen) == sorted(real * 2)
    assert results[0].num_steps == len(real)
    assert results[0].values["epochs"] == 2


def test_advantages_have_mean_0_and_variance_1_over_the_global_batch():
    stage = stage_of(minibatch_over="unrolls")
    batch = batch_for(stage)

    def body(link):
        group = link.group(range(link.size))
        trainer = trainer_of(stage, make_data_parallel("mpi", group, CPU, ["a"] * 3))
        share = torch.tensor_split(torch.arange(SIZE), [2, 5])[link.rank]
        prepared = stage.brain.prepare(columns_of(batch, share))
        before = prepared.behaviour["advantage"][~prepared.final].clone()
        trainer._normalize_advantages(prepared)
        assert (prepared.behaviour["advantage"][prepared.final] == 0).all()
        return before, prepared.behaviour["advantage"][~prepared.final]

    parts = run_loopback(body, 3)
    before = torch.cat([one for one, _ in parts]).double()
    after = torch.cat([one for _, one in parts])
    expected = (before - before.mean()) / before.std(correction=0)
    np.testing.assert_allclose(after, expected, atol=1e-5)


def test_epochs_end_early_where_the_policy_has_moved_too_far():
    stage = stage_of(epochs=10, minibatches=2, max_kl=1e-7)
    _, results = train(trainer_of(stage), batch_for(stage), steps=1)
    # At the first update pi is still mu; the second update of the epoch sees them differ.
    assert results[0].values["epochs"] == 1
    free = stage_of(epochs=10, minibatches=2)
    assert train(trainer_of(free), batch_for(free), steps=1)[1][0].values["epochs"] == 10


def test_learners_end_their_epochs_together_by_the_mean_divergence():
    """One learner's share alone would go on, the other's alone would end: the mean decides."""
    stage = stage_of(epochs=6, minibatches=1)
    batch = batch_for(stage)
    # Half of the batch with log-probabilities of another policy: far away from the start on.
    far = torch.arange(SIZE // 2, SIZE)
    batch.behaviour["log_prob"][:, far] -= 0.4
    halves = torch.arange(SIZE).chunk(2)
    alone = [divergence(stage, columns_of(batch, half)) for half in halves]
    together = divergence(stage, batch)
    assert alone[0] < together < alone[1]

    def epochs_of(bound):
        strict = stage_of(epochs=6, minibatches=1, max_kl=bound)

        def body(link):
            group = link.group(range(link.size))
            trainer = trainer_of(strict, make_data_parallel("mpi", group, CPU, ["a", "a"]))
            _, results = train(trainer, columns_of(batch, halves[link.rank]), steps=1)
            return results[0].values["epochs"]

        return run_loopback(body, 2)

    assert epochs_of((alone[0] + together) / 2) == [1, 1]  # the first half alone goes on
    counts = epochs_of((together + alone[1]) / 2)  # the second half alone would end at once
    assert counts[0] == counts[1] > 1


def divergence(stage, batch):
    """Mean divergence of the network as it is from the policy that acted."""
    once = trainer_of(stage)
    update, kls = once._update, []

    def noted(*arguments):
        result = update(*arguments)
        kls.append(result.values["kl"])
        return result

    once._update = noted
    train(once, batch, steps=1)
    return kls[0]


def test_statistics_are_those_of_all_observations_so_far_and_travel_with_the_weights():
    stage = stage_of(normalize_observations=True)
    batch = batch_for(stage)
    trainer = trainer_of(stage)
    first, second = (columns_of(batch, part) for part in torch.arange(SIZE).split([4, 8]))
    for index, piece in enumerate((first, second)):
        trainer.step(piece, index, 0, StageTimer(STAGES))
    path = next(iter(batch.observation))
    real = ~batch.final[:-1]
    numbers = batch.observation[path][:-1][real].double()
    named = trainer.flat.named(trainer.flat.value)
    assert named["statistics.count"] == len(numbers)
    np.testing.assert_allclose(named["statistics.mean.0"], numbers.mean(0), rtol=1e-5)
    variance = numbers.var(0, correction=0)
    np.testing.assert_allclose(named["statistics.variance.0"], variance, rtol=1e-4)
    # Another network with these weights normalizes alike.
    network = stage.brain.make_network(5)
    FlatParameters(network).value.copy_(trainer.flat.value)
    normal = network.statistics({path: batch.observation[path]})[path]
    expected = (batch.observation[path] - numbers.mean(0)) / variance.sqrt()
    np.testing.assert_allclose(normal, expected.clamp(-10, 10).float(), atol=1e-3)
