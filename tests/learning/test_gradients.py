"""A worker's gradient: of the mean over real transitions, clipped as a whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hpcrl.job import GRADIENT_STAGES
from hpcrl.learning.backward import NonFiniteLossError
from hpcrl.learning.gradients import GradientComputer, join_unrolls
from hpcrl.learning.optim import FlatParameters
from hpcrl.timing import StageTimer
from tests.acting.test_policy import acted, batch_of
from tests.acting_tools import CPU, weights


@pytest.fixture(scope="module")
def stage():
    """A recurrent policy whose episodes end by termination and by truncation."""
    return acted("scripted", steps=80, agent={"name": "a3c"}, layout="async_gradient")


def computed(stage, batch, max_grad_norm=0.0, **learner):
    config = stage.brain._config.learner
    optimizer = replace(config.optimizer, max_grad_norm=max_grad_norm)
    config = replace(config, optimizer=optimizer, **learner)
    computer = GradientComputer(stage.brain, config, CPU, seed=1)
    computer.load(weights(stage.brain, 3))
    return computer.compute(batch, 0, StageTimer(GRADIENT_STAGES))


def gradient_of_the_mean(stage, batch):
    net = stage.brain.make_network(0)
    flat = FlatParameters(net)
    flat.value.copy_(torch.from_numpy(weights(stage.brain, 3)))
    out = stage.brain.loss(net, batch, torch.Generator())
    real = int((~batch.final[:-1]).sum())
    (out.loss_sum / real).backward()
    return flat.grad.numpy().copy(), float(out.loss_sum) / real, real


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_is_of_the_mean_over_the_real_transitions(stage, micro_batches):
    batch = batch_of(stage)
    assert batch.final[:-1].any()
    want, loss, real = gradient_of_the_mean(stage, batch)
    got = computed(stage, batch, micro_batches=micro_batches)
    np.testing.assert_allclose(got.value, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    assert got.num_steps == real
    assert got.figures["loss"] == pytest.approx(loss, rel=1e-4)
    assert got.figures["grad_norm"] == pytest.approx(np.linalg.norm(want), rel=1e-4)
    assert tuple(got.metrics) == stage.brain.metrics


def test_it_is_clipped_by_the_norm_of_the_whole(stage):
    batch = batch_of(stage)
    want, _, _ = gradient_of_the_mean(stage, batch)
    norm = np.linalg.norm(want)
    got = computed(stage, batch, max_grad_norm=float(norm / 4))
    np.testing.assert_allclose(got.value, want / 4, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    assert got.figures["grad_norm"] == pytest.approx(norm, rel=1e-4)  # before the clip


def test_one_that_is_not_finite_is_never_returned(stage):
    batch = batch_of(stage)
    t, b = (~batch.final[:-1]).nonzero()[5].tolist()
    batch.reward[t + 1, b] = 3e38
    with pytest.raises(NonFiniteLossError, match="after 0 agent steps"):
        computed(stage, batch)


def test_unrolls_of_several_messages_are_one_batch(stage):
    messages = np.stack(stage.unrolls)
    parts = [messages[:1], messages[1:4], messages[4:]]
    joined = join_unrolls(parts, stage.layout, stage.spec, stage.brain.behaviour)
    whole = batch_of(stage)
    for name in ("reward", "action", "terminated", "final", "start", "core_state"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name))
