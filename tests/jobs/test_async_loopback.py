"""Jobs of `layout: async_gradient` in one process."""

import json
import signal
import threading

import numpy as np
import pytest
import torch

from hpcrl.brain import Brain
from hpcrl.exit_codes import DONE, REQUEUE, USAGE
from hpcrl.learning.backward import NonFiniteLossError
from hpcrl.learning.batches import assemble
from hpcrl.learning.gradients import GradientComputer
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.shards import Shard
from hpcrl.roles.parameter_server import ParameterServer
from hpcrl.run.checkpoint import load_latest
from hpcrl.run.metrics import read_metrics
from hpcrl.types import NetInputs
from tests.jobs.test_layouts_loopback import run_job, size_of, worker_config
from tests.loopback_job import JobRun, history_of, left_over
from tests.small import env_spec

UNROLL_STEPS = 5


def async_config(run_dir, servers=1, workers=3, **sections):
    return worker_config(
        run_dir, servers, workers, layout="async_gradient", agent={"name": "a3c"}, **sections
    )


def status_of(run_dir):
    return json.loads((run_dir / "STATUS.json").read_text())


@pytest.fixture
def takes(monkeypatch):
    """Every gradient that a shard was offered: (first element of the shard, lag, applied)."""
    log, take = [], Shard.take

    def noted(self, gradient, version, agent_steps):
        taken = take(self, gradient, version, agent_steps)
        log.append((id(self), taken.lag, taken.applied))
        return taken

    monkeypatch.setattr(Shard, "take", noted)
    return log


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"truncate": True}, {"truncate": True, "episode_length": 1, "length_spread": 1}],
    ids=["terminating", "truncating", "one_step_episodes"],
)
def test_gradients_are_of_equal_shares_of_one_version_and_lags_are_counted(
    tmp_path, monkeypatch, takes, servers, options
):
    config = async_config(tmp_path / "run", servers, options=options)
    run = run_job(monkeypatch, config)
    for share in run.unrolls.values():
        for first in range(0, len(share), 4):
            batch = share[first : first + 4]
            assert len({int(unroll["env_id"]) for unroll in batch}) == 4
            assert len({int(v) for unroll in batch for v in unroll["policy_version"]}) == 1
    assert len(run.unrolls) == 3
    counters = status_of(tmp_path / "run")["counters"]
    shards = {shard for shard, _, _ in takes}
    assert len(shards) == servers
    applied = {shard: sum(a for s, _, a in takes if s == shard) for shard in shards}
    assert counters["learner_steps"] in applied.values()
    assert counters["agent_steps"] >= 400
    lags = [lag for _, lag, taken in takes if taken]
    record = read_metrics(tmp_path / "run")[-1]
    assert 0 <= record["gradient_lag"] <= record["gradient_lag_max"] <= max(lags)
    assert max(lags) <= 4 * 3
    assert left_over(run.world, "steps", "unrolls", "control", "gradients") == []


def test_a_lone_workers_unrolls_hold_what_its_environments_gave(tmp_path, monkeypatch):
    env = {"envs_per_actor": 4, "groups": 2}
    config = async_config(tmp_path / "run", 1, 1, options={"length_spread": 0}, env=env)
    run = run_job(monkeypatch, config)
    for env_id in range(4):
        unrolls = run.of_environment(env_id)
        # The action of the very last row may have been withheld when the run ended.
        history_of(run, unrolls[0]).check(unrolls[:-1], UNROLL_STEPS)


def literal_loss(net, distribution, batch, discount, value_cost, entropy_cost):
    """The mean loss of a batch whose episodes terminate, one transition at a time."""
    inputs = NetInputs(batch.observation, batch.reward, batch.previous_action, batch.start)
    outputs, _ = net(inputs, batch.core_state)
    log_prob = distribution.log_prob(outputs.policy, batch.action)
    entropy = distribution.entropy(outputs.policy)
    total, count = torch.zeros(()), 0
    for b in range(batch.reward.shape[1]):
        following = outputs.value[-1, b].detach()
        for t in reversed(range(len(batch.reward) - 1)):
            going_on = 0.0 if batch.terminated[t + 1, b] else discount
            following = batch.reward[t + 1, b] + going_on * following
            error = following - outputs.value[t, b]
            total = total - error.detach() * log_prob[t, b] + value_cost * 0.5 * error**2
            total = total - entropy_cost * entropy[t, b]
            count += 1
    return total / count


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(("servers", "optimizer"), [(1, "rmsprop"), (2, "adam")])
def test_one_worker_trains_as_a_plain_synchronous_loop(
    tmp_path, monkeypatch, core, servers, optimizer
):
    loaded, load = [], GradientComputer.load

    def noted(self, parameters):
        loaded.append(parameters.copy())
        load(self, parameters)

    monkeypatch.setattr(GradientComputer, "load", noted)
    settings = {"name": optimizer, "learning_rate": 0.01, "max_grad_norm": 0.5}
    config = async_config(
        tmp_path / "run",
        servers,
        1,
        options={"observation_shape": (2,), "observation_dtype": "float32"},
        network={"core": core, "core_size": 4, "hidden_sizes": [8]},
        learner={"optimizer": settings},
        stop={"agent_steps": 300},
    )
    run = run_job(monkeypatch, config)
    (unrolls,) = run.unrolls.values()
    env = env_spec(observation_shape=(2,), observation_dtype="float32")
    brain = Brain(config, env)
    net = brain.make_network(0)
    flat = FlatParameters(net)
    flat.value.copy_(torch.from_numpy(loaded[0]))
    kind = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[optimizer]
    optimizer = kind(net.parameters(), lr=0.01)
    steps = min(len(loaded) - 1, len(unrolls) // 4)
    assert steps >= 15
    moved = 0.0
    for step in range(steps):
        chosen = unrolls[4 * step : 4 * step + 4]
        views = {name: np.stack([unroll[name] for unroll in chosen]) for name in chosen[0]}
        batch = assemble(views, np.arange(4), env, brain.behaviour)
        flat.zero_grad()
        literal_loss(net, brain.distribution, batch, 0.99, 0.5, 0.01).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        moved = max(moved, float(np.abs(loaded[step + 1] - loaded[step]).max()))
        np.testing.assert_allclose(flat.value.numpy(), loaded[step + 1], rtol=1e-3, atol=2e-4)
        flat.value.copy_(torch.from_numpy(loaded[step + 1]))
    assert moved > 1e-3


def test_a_worker_that_is_held_back_holds_nobody_up(tmp_path, monkeypatch, takes):
    others_go_on, released = threading.Event(), threading.Event()
    held: list = []
    at_release: list = []

    def before_step(envs):
        if not held:
            held.append((envs, len(run.all_unrolls)))
        if envs is held[0][0] and len(run.all_unrolls) >= 24 and not released.is_set():
            held.append(len(run.all_unrolls))
            assert others_go_on.wait(60), "nobody trained on while one worker was held back"
            released.set()
            at_release.append(len(run.all_unrolls))

    def after_batch(run):
        count = len(run.all_unrolls)
        if len(held) > 1 and count >= held[1] + 4 * 40:
            others_go_on.set()
        if at_release and count >= at_release[0] + 4 * 60:
            run.signal(signal.SIGTERM)

    config = async_config(
        tmp_path / "run",
        2,
        stop={"agent_steps": 10**9},
        learner={"max_gradient_lag": 8},
        checkpoint={"every_s": 0.2},
    )
    run = JobRun(monkeypatch, before_step, after_batch)
    run.start(config, size_of(config))
    assert run.codes == [REQUEUE] * 5
    dropped = [lag for _, lag, applied in takes if not applied]
    assert dropped
    assert max(dropped) >= 30
    assert max(lag for _, lag, applied in takes if applied) <= 8
    records = read_metrics(tmp_path / "run")
    assert records[-1]["dropped_gradients"] >= 1
    assert max(record["gradient_lag_max"] for record in records) <= 8


@pytest.mark.parametrize("own", [False, True], ids=["all", "second_server"])
def test_a_signal_stops_all_ranks_with_a_durable_checkpoint(tmp_path, monkeypatch, own):
    serve = ParameterServer.serve

    def signalled(self, **arguments):
        if self.shard.version >= 20 and self.job.role_index == 1:
            run.signal(signal.SIGTERM, own=own)
        return serve(self, **arguments)

    monkeypatch.setattr(ParameterServer, "serve", signalled)
    config = async_config(tmp_path / "run", 2, stop={"agent_steps": 10**9})
    run = JobRun(monkeypatch)
    run.start(config, size_of(config))
    assert run.codes == [REQUEUE] * 5
    status = status_of(tmp_path / "run")
    assert status["state"] == "requeue"
    checkpoint = load_latest(tmp_path / "run")
    assert checkpoint.step == status["checkpoint_step"] == status["counters"]["learner_steps"]
    assert checkpoint.state["counters"] == status["counters"]
    bounds = [(shard["first"], shard["last"]) for shard in checkpoint.state["shards"]]
    assert len(bounds) == 2
    assert bounds[0][0] == 0
    assert bounds[0][1] == bounds[1][0]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_run_goes_on_with_another_number_of_servers(tmp_path, monkeypatch, before, after):
    learner = {"optimizer": {"schedule": "linear", "learning_rate": 0.01}}
    run_dir = tmp_path / "run"
    stop = {"agent_steps": 4000}
    first = async_config(run_dir, before, learner=learner, stop=stop)
    run = JobRun(
        monkeypatch,
        after_batch=lambda run: len(run.all_unrolls) >= 80 and run.signal(signal.SIGTERM),
    )
    run.start(first, size_of(first))
    assert set(run.codes) == {REQUEUE}
    saved = load_latest(run_dir)
    at_stop = status_of(run_dir)["counters"]
    loaded, load = [], GradientComputer.load

    def noted(self, parameters):
        loaded.append(parameters.copy())
        load(self, parameters)

    monkeypatch.setattr(GradientComputer, "load", noted)
    second = run_job(monkeypatch, async_config(run_dir, after, learner=learner, stop=stop))
    # The first parameters that anybody works with are the saved ones.
    brain = Brain(first, env_spec())
    flat = FlatParameters(brain.make_network(0))
    flat.value.copy_(torch.from_numpy(loaded[0]))
    for name, view in flat.named(flat.value).items():
        np.testing.assert_array_equal(view.numpy(), saved.tensors[f"model.{name}"])
    status = status_of(run_dir)
    assert status["restart"] == 1
    assert status["resumed_learner_step"] == saved.step == at_stop["learner_steps"]
    assert status["counters"]["agent_steps"] >= 4000 > at_stop["agent_steps"]
    assert len(load_latest(run_dir).state["shards"]) == after
    versions = np.stack([unroll["policy_version"] for unroll in second.all_unrolls])
    assert versions.min() == saved.step
    series = [record["agent_steps"] for record in read_metrics(run_dir)]
    assert series == sorted(series)


def test_periodic_checkpoints_hold_one_state_of_every_shard(tmp_path, monkeypatch):
    def after_batch(run):
        if len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) >= 3:
            run.signal(signal.SIGTERM)

    config = async_config(
        tmp_path / "run", 3, stop={"agent_steps": 10**9}, checkpoint={"every_s": 0.05}
    )
    run = JobRun(monkeypatch, after_batch=after_batch)
    run.start(config, size_of(config))
    assert run.codes == [REQUEUE] * 6
    checkpoint = load_latest(tmp_path / "run")
    versions = [record["version"] for record in checkpoint.state["shards"]]
    assert max(versions) - min(versions) <= 3  # at most one gradient of each worker under way
    counts = [record["step_count"] for record in checkpoint.state["shards"]]
    assert counts == versions


def test_a_loss_that_is_not_finite_dumps_the_batch_and_ends_the_job(tmp_path, monkeypatch):
    def spoilt(views, slots, env, behaviour):
        batch = assemble(views, slots, env, behaviour)
        batch.reward[1, 0] = float("nan")
        return batch

    config = async_config(tmp_path / "run", 1, 1)
    run = JobRun(monkeypatch)
    monkeypatch.setattr("hpcrl.learning.gradients.assemble", spoilt)
    with pytest.raises(NonFiniteLossError, match="loss nan after 0 agent steps"):
        run.start(config, size_of(config))
    with np.load(tmp_path / "run" / "nan_batch_rank1.npz") as batch:
        assert np.isnan(batch["reward"][1, 0])
        assert batch["obs:obs"].shape[:2] == (UNROLL_STEPS + 1, 4)


def test_times_of_workers_and_servers_are_in_the_metrics(tmp_path, monkeypatch):
    run_job(monkeypatch, async_config(tmp_path / "run", 2, stop={"agent_steps": 4000}))
    record = read_metrics(tmp_path / "run")[-1]
    for name in (
        *("actor_step_share", "inference_forward_share", "worker_forward_backward_share"),
        *("worker_exchange_share", "learner_optimizer_share", "learner_wait_share"),
    ):
        assert record[name] > 0, name
    assert record["env_steps_per_s"] > 0
    assert record["explained_variance"] <= 1


def test_a_job_without_workers_ends_every_rank_with_code_2(tmp_path, monkeypatch, capfd):
    config = async_config(tmp_path / "run", 2, 0)
    run = JobRun(monkeypatch).start(config, 2)
    assert run.codes == [USAGE] * 2
    error = capfd.readouterr().err
    assert "a run needs at least one worker" in error
    assert "Traceback" not in error


def test_all_ranks_end_with_the_code_of_the_goal(tmp_path, monkeypatch):
    config = async_config(tmp_path / "run", 3, 2)
    run = JobRun(monkeypatch).start(config, size_of(config))
    assert run.codes == [DONE] * 5
    status = status_of(tmp_path / "run")
    assert status["verdict"] == "stop.agent_steps 400 reached"
    assert status["backend"] == "asynchronous"
