"""All roles together in one process: what environments give is what learners get."""

import json
import signal
import time

import numpy as np
import pytest

from hpcrl.exit_codes import DONE, REQUEUE, USAGE
from hpcrl.learning.trainer import Trainer
from hpcrl.run.checkpoint import load_latest, save_checkpoint
from hpcrl.run.metrics import read_metrics
from tests.loopback_job import JobRun, history_of, left_over
from tests.small import config_of

UNROLL_STEPS = 5


def job_config(tmp_path, learners=1, inference=2, actors=3, options=None, **sections):
    """Three actors on two inference ranks: uneven loads."""
    base: dict[str, dict] = {
        "run": {"dir": str(tmp_path / "run")},
        "env": {
            "name": "synthetic:counting",
            "envs_per_actor": 4,
            "groups": 2,
            "options": {"episode_length": 3, "length_spread": 4, **(options or {})},
        },
        "topology": {"learners": learners, "inference": inference, "actors": actors},
        "learner": {"batch_unrolls": 4, "unroll_steps": UNROLL_STEPS, "backend": "mpi"},
        "stop": {"agent_steps": 400},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return config_of(**base)


def world_size(config):
    topology = config.topology
    return topology.learners + topology.inference + topology.actors


def run_job(monkeypatch, config, **hooks):
    return JobRun(monkeypatch, **hooks).start(config, world_size(config))


def status_of(config):
    with open(f"{config.run.dir}/STATUS.json") as file:
        return json.load(file)


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"truncate": True}, {"truncate": True, "episode_length": 1, "length_spread": 1}],
    ids=["terminating", "truncating", "one_step_episodes"],
)
def test_learners_get_every_transition_once_and_in_order(tmp_path, monkeypatch, learners, options):
    config = job_config(tmp_path, learners=learners, options=options)
    run = run_job(monkeypatch, config)
    assert run.codes == [DONE] * world_size(config)
    env_ids = sorted({int(unroll["env_id"]) for unroll in run.all_unrolls})
    assert env_ids == list(range(12))
    origins = set()
    for env_id in env_ids:
        unrolls = run.of_environment(env_id)
        history = history_of(run, unrolls[0])
        origins.add(id(history))
        history.check(unrolls, UNROLL_STEPS)
    assert len(origins) == 12
    # Both cells feed their own learner.
    assert len(run.unrolls) == learners
    # Real transitions are what the counters count.
    real = sum(int((~unroll["final"][:-1]).sum()) for unroll in run.all_unrolls)
    counters = status_of(config)["counters"]
    assert counters["agent_steps"] == counters["frames"] == real >= 400
    assert counters["learner_steps"] == len(run.all_unrolls) // 4
    versions = np.stack([unroll["policy_version"] for unroll in run.all_unrolls])
    assert versions.min() >= 0
    assert versions.max() > 0
    assert (np.diff(versions, axis=1) >= 0).all()


def test_environments_that_need_a_step_to_reset_lose_and_invent_nothing(tmp_path, monkeypatch):
    name = "tests.env_wrappers.scripted:make_vector"
    config = job_config(tmp_path, env={"name": name, "options": {"mode": "NEXT_STEP"}})
    run = run_job(monkeypatch, config)
    assert run.codes == [DONE] * 6
    # These environments don't tell where they come from: match by the actions that they were told.
    for env_id in range(12):
        unrolls = run.of_environment(env_id)
        matches = 0
        for history in run.histories:
            try:
                history.check(unrolls, UNROLL_STEPS)
            except AssertionError:
                continue
            matches += 1
        assert matches >= 1


def test_back_pressure_bounds_what_is_ahead_of_a_slow_learner(tmp_path, monkeypatch):
    step = Trainer.step

    def slow_step(self, *arguments):
        time.sleep(0.05)
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "step", slow_step)
    config = job_config(tmp_path, options={"length_spread": 0}, stop={"agent_steps": 400})
    run = run_job(monkeypatch, config)
    queue, credits = 2 * 4, 2 * 2
    # Beyond queue and credits: what one batch of acting completes at most (a row each of all
    # environments, after which a rank is held back), the batch in the learner's hands, partial
    # unrolls, and the steps that wait for their actions.
    unrolls = queue + credits + 12 + 4
    assert max(run.ahead) <= unrolls * UNROLL_STEPS + 12 * (UNROLL_STEPS + 1)
    # The learner was the slow side indeed, so the bound is nearly reached.
    assert max(run.ahead) >= (queue + credits) * UNROLL_STEPS


def test_stop_leaves_no_message_behind(tmp_path, monkeypatch):
    run = run_job(monkeypatch, job_config(tmp_path))
    assert left_over(run.world, "steps", "unrolls", "control") == []
    # A copy or a request of weights may be under way; both ends withdraw their receives.
    assert len(left_over(run.world, "weights")) <= 2


@pytest.mark.parametrize("by", ["all", "one_learner"])
def test_a_signal_stops_all_ranks_with_a_durable_checkpoint(tmp_path, monkeypatch, by):
    def after_batch(run):
        if len(run.all_unrolls) >= 24:
            run.signal(signal.SIGTERM, own=by == "one_learner")

    def slow_save(*arguments):  # so that a rank that doesn't wait for it shows
        time.sleep(0.5)
        return save_checkpoint(*arguments)

    monkeypatch.setattr("hpcrl.run.checkpoint_writer.save_checkpoint", slow_save)
    config = job_config(tmp_path, learners=2, stop={"agent_steps": 10**9})
    run = run_job(monkeypatch, config, after_batch=after_batch)
    assert run.codes == [REQUEUE] * 7
    status = status_of(config)
    assert status["state"] == "requeue"
    checkpoint = load_latest(tmp_path / "run")
    assert checkpoint.step == status["checkpoint_step"] == status["counters"]["learner_steps"]
    assert checkpoint.state["counters"] == status["counters"]
    assert read_metrics(tmp_path / "run")[-1]["learner_steps"] == checkpoint.step


def test_a_resumed_run_continues_counters_metrics_and_schedule_exactly(tmp_path, monkeypatch):
    learner = {"optimizer": {"schedule": "linear", "learning_rate": 0.01}}
    whole = job_config(tmp_path / "a", learner=learner)
    assert set(run_job(monkeypatch, whole).codes) == {DONE}

    broken = job_config(tmp_path / "b", learner=learner)
    stop = 7
    first = run_job(
        monkeypatch,
        broken,
        after_batch=lambda run: len(run.all_unrolls) >= 4 * stop and run.signal(signal.SIGUSR2),
    )
    assert set(first.codes) == {REQUEUE}
    at_stop = status_of(broken)["counters"]
    assert at_stop["learner_steps"] == stop
    second = run_job(monkeypatch, broken)
    assert set(second.codes) == {DONE}

    expected, got = status_of(whole), status_of(broken)
    for name in ("learner_steps", "agent_steps", "frames"):
        assert got["counters"][name] == expected["counters"][name]
    assert got["restart"] == 1
    assert got["resumed_learner_step"] == stop
    assert got["counters"]["wall_time_s"] > at_stop["wall_time_s"]
    records = read_metrics(tmp_path / "b" / "run")
    for name in ("learner_steps", "agent_steps", "episodes", "wall_time_s"):
        series = [record[name] for record in records]
        assert series == sorted(series), name
    rates = {
        record["agent_steps"]: record["learning_rate"]
        for record in records
        if record.get("learning_rate")
    }
    assert rates
    # The first version that acts is the one that was saved.
    versions = np.stack([unroll["policy_version"] for unroll in second.all_unrolls])
    assert versions.min() == stop


def test_trap22_seeds_are_distinct_reproducible_and_new_after_a_restart(tmp_path, monkeypatch):
    config = job_config(tmp_path, stop={"agent_steps": 40})
    first = run_job(monkeypatch, config)
    assert len(set(first.seeds)) == 12
    again = run_job(monkeypatch, job_config(tmp_path / "again", stop={"agent_steps": 40}))
    assert sorted(again.seeds) == sorted(first.seeds)
    resumed = run_job(monkeypatch, job_config(tmp_path, stop={"agent_steps": 80}))
    assert not set(resumed.seeds) & set(first.seeds)
    other = job_config(tmp_path / "other", run={"seed": 2, "dir": str(tmp_path / "other")})
    assert not set(run_job(monkeypatch, other).seeds) & set(first.seeds)


def test_trap20_returns_are_raw_and_whole_however_rewards_are_clipped(tmp_path, monkeypatch):
    config = job_config(
        tmp_path,
        options={"episode_length": 4, "length_spread": 0},
        agent={"reward_clip": 1.0},
        learner={"unroll_steps": 3},
    )
    run_job(monkeypatch, config)
    status = status_of(config)
    assert status["mean_return_100"] == 1 + 2 + 3 + 4
    assert status["mean_episode_steps_100"] == 4


def test_configured_waits_and_message_sizes_reach_every_link(tmp_path, monkeypatch):
    settings = {"wait": "yield", "deadline_s": 43.0, "max_message_bytes": 12345}
    run = run_job(monkeypatch, job_config(tmp_path, transport=settings, stop={"agent_steps": 20}))
    assert len(run.links) == 6
    for link in run.links.values():
        assert (link.wait_policy, link.deadline_s) == ("yield", 43.0)
        assert link.max_message_bytes == 12345


def test_the_deadline_stops_a_run_in_time_to_checkpoint(tmp_path, monkeypatch):
    settings = {"deadline": str(time.time() + 100.5), "deadline_lead_s": 100.0}
    config = job_config(
        tmp_path, run={"dir": str(tmp_path / "run"), **settings}, stop={"agent_steps": 10**9}
    )
    run = run_job(monkeypatch, config)
    assert run.codes == [REQUEUE] * 6
    status = status_of(config)
    assert status["verdict"] == "the deadline is near"
    assert load_latest(tmp_path / "run").step == status["counters"]["learner_steps"]


class InjectedError(Exception):
    pass


@pytest.mark.parametrize("role", ["actor", "inference", "learner"])
def test_a_failure_in_any_role_ends_all_ranks(tmp_path, monkeypatch, role):
    calls = 0

    def fail_at_20(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls >= 20:
            raise InjectedError(role)

    if role == "inference":
        from hpcrl.acting.policy import ActingPolicy

        record = ActingPolicy.record
        monkeypatch.setattr(ActingPolicy, "record", lambda self: fail_at_20() or record(self))
    if role == "learner":
        step = Trainer.step
        monkeypatch.setattr(
            Trainer, "step", lambda self, *arguments: fail_at_20() or step(self, *arguments)
        )
    hooks = {"before_step": fail_at_20} if role == "actor" else {}
    config = job_config(tmp_path, learners=2, stop={"agent_steps": 10**9})
    with pytest.raises(InjectedError, match=role):
        run_job(monkeypatch, config, **hooks)
    assert calls >= 20


@pytest.mark.parametrize(
    ("sections", "size", "message"),
    [
        ({"learner": {"batch_unrolls": 5}, "learners": 2}, 7, "learner.batch_unrolls 5 can't be"),
        ({"learner": {"micro_batches": 5}}, 6, "learner.micro_batches 5 is more than the 4"),
        ({"learner": {"queue_unrolls": 3}}, 6, "learner.queue_unrolls 3 is less than the 4"),
        ({"env": {"name": "synthetic:counted"}}, 6, "did you mean 'counting'"),
        ({"env": {"name": "no_such_module:make"}}, 6, "no_such_module"),
        (
            {"env": {"name": "dmlab:lt_chasm"}},
            6,
            "needs dmlab-gym, not installed here: pip install",
        ),
        ({"env": {"name": "minatar:Breakot", "options": {}}}, 6, "did you mean 'Breakout'"),
        (
            {"env": {"name": "gym:CartPole-v1", "options": {"kwargs": {"mass": 2}}}},
            6,
            "gym:CartPole-v1 doesn't take all of the kwargs {'mass': 2}",
        ),
        (
            {"env": {"isolation": "process", "python": "/nowhere/python"}},
            6,
            "env.python: /nowhere/python can't be started",
        ),
        ({"run": {"dir": "/proc/no-run"}}, 6, "can't write to run directory /proc/no-run"),
        ({}, 5, "= 6 > world size 5: found 5 ranks, need at least 6"),
        ({"network": {"torso": "nature_cnn"}}, 6, "nature_cnn"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_ends_every_rank_with_code_2_and_one_message(
    tmp_path, monkeypatch, capfd, sections, size, message
):
    config = job_config(tmp_path, **sections)
    run = JobRun(monkeypatch).start(config, size)
    assert run.codes == [USAGE] * size
    error = capfd.readouterr().err
    assert message in error
    assert error.count("hpcrl:") == 1
    assert "Traceback" not in error
