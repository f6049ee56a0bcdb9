"""One learner step: shares equal the whole, bad losses touch nothing, states continue exactly."""

import threading

import numpy as np
import pytest
import torch

from hpcrl.learning.backward import NonFiniteLossError
from hpcrl.learning.data_parallel import SingleLearner, make_data_parallel
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.trainer import Trainer, load_model
from hpcrl.timing import StageTimer
from tests.acting.test_policy import acted, batch_of
from tests.acting_tools import CPU, RECURRENT, Stage
from tests.loopback_runner import run_loopback

STAGES = ("copy", "forward_backward", "all_reduce", "optimizer")
NETWORK = {"hidden_sizes": [8], **RECURRENT, "previous_reward_clip": 1.0}


def stage_of(**learner) -> Stage:
    settings = {"optimizer": {"max_grad_norm": 0.5, "learning_rate": 0.01}, **learner}
    return acted("scripted", steps=80, network=NETWORK, learner=settings)


def batches(stage, count=3, size=12):
    """Different batches of `size` unrolls, with real counts that differ between unrolls."""
    whole = batch_of(stage)
    whole = whole._replace(reward=whole.reward / 100)
    columns = torch.arange(whole.reward.shape[1])
    assert len(columns) > size
    made = []
    for index in range(count):
        chosen = columns.roll(5 * index)[:size]
        # Those with fewer real transitions come last, so that shares differ in their number.
        chosen = chosen[whole.final[:-1, chosen].sum(0).argsort()]
        made.append(columns_of(whole, chosen))
    return made


def spoil(batch):
    """Make the loss of one real transition infinite: its square is no float32."""
    t, b = (~batch.final[:-1]).nonzero()[5].tolist()
    batch.reward[t + 1, b] = 3e38


def columns_of(batch, chosen):
    return batch._replace(
        observation={path: leaf[:, chosen] for path, leaf in batch.observation.items()},
        behaviour={name: leaf[:, chosen] for name, leaf in batch.behaviour.items()},
        core_state=batch.core_state[chosen],
        **{
            name: getattr(batch, name)[:, chosen]
            for name in batch._fields
            if name not in ("observation", "behaviour", "core_state")
        },
    )


def trainer_of(stage, data_parallel=None, seed=1, **learner) -> Trainer:
    config = stage.brain._config.learner
    config = type(config)(**{**vars(config), **learner})
    return Trainer(stage.brain, config, data_parallel or SingleLearner(), CPU, 100_000, seed)


def step(trainer, batch, number=0):
    return trainer.step(batch, 10 + number, 1000 * number, StageTimer(STAGES))


def trained(stage, steps=3, **learner):
    """Parameters and step results after some steps."""
    trainer = trainer_of(stage, **learner)
    results = [step(trainer, batch, i) for i, batch in enumerate(batches(stage, steps))]
    return trainer.parameters().copy(), results


def assert_same_training(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=2e-6)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert one.num_steps == other.num_steps
        assert one.values == pytest.approx(other.values, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("learners", [2, 3])
def test_trap16_learners_with_shares_equal_one_with_the_whole_batch(learners, monkeypatch):
    stage = stage_of()
    lock, make_network = threading.Lock(), stage.brain.make_network

    def one_at_a_time(seed):  # threads share torch's default random stream
        with lock:
            return make_network(seed)

    monkeypatch.setattr(stage.brain, "make_network", one_at_a_time)
    alone = trained(stage)
    assert np.abs(alone[0] - trainer_of(stage).parameters()).max() > 1e-2

    def body(link):
        group = link.group(range(learners))
        parallel = make_data_parallel("mpi", group, CPU, ["a"] * learners)
        # Only learner 0's initial weights count.
        trainer = trainer_of(stage, parallel, seed=1 if link.rank == 0 else 99)
        results = []
        for number, batch in enumerate(batches(stage)):
            share = batch.reward.shape[1] // learners
            columns = torch.arange(link.rank * share, (link.rank + 1) * share)
            results.append(step(trainer, columns_of(batch, columns), number))
        return trainer.parameters().copy(), results

    shares = run_loopback(body, learners)
    counts = batch_counts(stage, learners)
    assert len(set(counts)) > 1  # so that the mean of means would be another number
    for share in shares:
        np.testing.assert_array_equal(share[0], shares[0][0])
        assert_same_training(share, alone)


def batch_counts(stage, learners):
    """Real transitions of each learner's share of the first batch."""
    final = batches(stage, 1)[0].final[:-1]
    return [int((~part).sum()) for part in final.chunk(learners, 1)]


@pytest.mark.parametrize("parts", [2, 3, 5, 12])
def test_micro_batches_equal_one_batch(parts):
    stage = stage_of()
    assert_same_training(trained(stage, micro_batches=parts), trained(stage))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_network_trains_the_same(monkeypatch):
    # Compiling in this process: a pool of processes that import torch first would take longer.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    stage = acted("terminating", steps=80, network={"hidden_sizes": [8]})
    torch._dynamo.reset()
    compiled = trained(stage, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_same_training(compiled, trained(stage))


def test_the_step_is_that_of_the_mean_loss_over_real_transitions():
    """Gradient, clip and step worked out with torch's own optimizer."""
    stage = stage_of()
    (batch,) = batches(stage, 1)
    trainer = trainer_of(stage)
    net = stage.brain.make_network(1)
    out = stage.brain.loss(net, batch, torch.Generator())
    (out.loss_sum / out.count).backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    torch.optim.Adam(net.parameters(), lr=0.01).step()
    result = step(trainer, batch)
    assert result.num_steps == int((~batch.final[:-1]).sum())
    assert result.values["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert norm > 0.5
    assert result.values["loss"] == pytest.approx((out.loss_sum / out.count).item(), rel=1e-4)
    updated = trainer.flat.named(trainer.flat.value)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(updated[name], parameter, rtol=1e-4, atol=1e-5)


def test_policy_lag_is_the_mean_number_of_versions_over_real_transitions():
    stage = stage_of()
    (batch,) = batches(stage, 1)
    versions = torch.arange(batch.policy_version.numel()).reshape(batch.policy_version.shape) % 7
    result = step(trainer_of(stage), batch._replace(policy_version=versions))
    real = ~batch.final[:-1]
    expected = (10 - versions[:-1][real]).float().mean()
    assert result.values["policy_lag"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_loss_that_is_not_finite_raises_and_leaves_everything_untouched(precision):
    stage = stage_of()
    good, bad = batches(stage, 2)
    spoil(bad)
    trainer = trainer_of(stage, precision=precision)
    step(trainer, good)
    before = trainer.state()
    with pytest.raises(NonFiniteLossError, match=r"loss (inf|nan) after 1000 agent steps"):
        step(trainer, bad, 1)
    after = trainer.state()
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_a_gradient_that_is_not_finite_raises_and_leaves_everything_untouched(monkeypatch):
    stage = stage_of()
    (batch,) = batches(stage, 1)
    trainer = trainer_of(stage)
    loss = stage.brain.loss

    def spoilt(*arguments):
        out = loss(*arguments)
        out.loss_sum.register_hook(lambda grad: grad * torch.nan)
        return out

    monkeypatch.setattr(stage.brain, "loss", spoilt)
    before = trainer.state()
    with pytest.raises(NonFiniteLossError, match="gradient"):
        step(trainer, batch)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_one_learners_bad_loss_raises_on_all_of_them():
    stage = stage_of()

    def body(link):
        group = link.group(range(2))
        trainer = trainer_of(stage, make_data_parallel("mpi", group, CPU, ["a"] * 2))
        (batch,) = batches(stage, 1)
        if link.rank == 1:
            spoil(batch)
        before = trainer.parameters().copy()
        with pytest.raises(NonFiniteLossError):
            step(trainer, batch)
        return bool((trainer.parameters() == before).all())

    assert run_loopback(body, 2) == [True, True]


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    "optimizer", [{"name": "adam"}, {"name": "rmsprop", "momentum": 0.5, "schedule": "linear"}]
)
def test_a_state_continues_bit_for_bit(precision, optimizer):
    stage = stage_of(optimizer=optimizer, precision=precision)
    first, second, third = batches(stage, 3)
    unbroken = trainer_of(stage)
    for number, batch in enumerate((first, second, third)):
        step(unbroken, batch, number)
    broken = trainer_of(stage)
    step(broken, first, 0)
    saved = broken.state()
    step(broken, third, 1)  # what was saved does not follow
    resumed = trainer_of(stage, seed=77)
    resumed.load_state(saved)
    for number, batch in ((1, second), (2, third)):
        step(resumed, batch, number)
    expected, got = unbroken.state(), resumed.state()
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_a_state_of_another_network_or_optimizer_is_refused():
    stage = stage_of()
    other = acted("scripted", steps=8, network={**NETWORK, "hidden_sizes": [9]})
    state = trainer_of(stage).state()
    with pytest.raises(ValueError, match="of another network"):
        trainer_of(other).load_state(state)
    rmsprop = stage_of(optimizer={"name": "rmsprop"})
    with pytest.raises(ValueError, match="optimizer"):
        trainer_of(rmsprop).load_state(state)
    with pytest.raises(ValueError, match=r"with learner.precision a precision other than float16"):
        trainer_of(stage_of(precision="float16")).load_state(state)
    scaled = trainer_of(stage_of(precision="float16")).state()
    with pytest.raises(ValueError, match=r"with learner.precision float16, and this run is not"):
        trainer_of(stage).load_state(scaled)
    targeted = {**state, **{n.replace("model.", "target."): v for n, v in state.items()}}
    with pytest.raises(ValueError, match="has a target network: it is of another agent"):
        trainer_of(stage).load_state(targeted)
    flat = FlatParameters(other.brain.make_network(0))
    before = flat.value.clone()
    with pytest.raises(ValueError, match="of another network"):
        load_model(flat, {"value.weight": torch.zeros(1, 5)})
    assert torch.equal(flat.value, before)


def test_float16_scales_the_loss_and_skips_steps_that_overflow():
    stage = stage_of()
    first, second = batches(stage, 2)
    exact = trainer_of(stage)
    step(exact, first)
    trainer = trainer_of(stage, precision="float16")
    trainer.scaler.scale = 2.0**6
    assert not step(trainer, first).skipped
    moved = exact.parameters() != trainer_of(stage).parameters()
    # A first step of Adam moves a parameter by the learning rate, in its gradient's direction.
    same = np.abs(trainer.parameters() - exact.parameters()) < 0.005
    assert same[moved].mean() > 0.95
    before = trainer.parameters().copy()
    trainer.scaler.scale = 2.0**24
    result = step(trainer, second, 1)
    assert result.skipped
    assert np.isfinite(result.values["loss"])
    assert result.num_steps > 0  # these transitions were used up all the same
    np.testing.assert_array_equal(trainer.parameters(), before)
    assert trainer.scaler.scale == 2.0**23


def test_float16_finds_its_scale_by_itself_and_then_trains():
    stage = stage_of()
    (batch,) = batches(stage, 1)
    trainer = trainer_of(stage, precision="float16")
    results = [step(trainer, batch, number) for number in range(30)]
    assert not any(result.skipped for result in results[-10:])
    assert results[-1].values["loss"] < results[0].values["loss"]


def test_bfloat16_trains_close_to_float32():
    stage = stage_of()
    exact, rough = trained(stage), trained(stage, precision="bfloat16")
    assert not np.array_equal(exact[0], rough[0])
    np.testing.assert_allclose(rough[0], exact[0], atol=0.05)
    for one, other in zip(exact[1], rough[1], strict=True):
        assert one.num_steps == other.num_steps
        assert other.values["loss"] == pytest.approx(one.values["loss"], rel=0.1, abs=0.1)


def test_every_stage_is_timed():
    stage = stage_of()
    timer = StageTimer(STAGES)
    trainer_of(stage).step(batches(stage, 1)[0], 0, 0, timer)
    assert all(seconds > 0 for seconds in timer.seconds.values())
