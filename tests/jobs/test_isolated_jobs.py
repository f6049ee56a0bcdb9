"""Jobs whose environments break in every way: nothing bogus is learned, and all is counted."""

import json

import psutil
import pytest

from hpcrl.config.load import ConfigError
from hpcrl.exit_codes import DONE, ENVIRONMENTS
from hpcrl.run.metrics import read_metrics
from hpcrl.run.verdict import Attempt, judge
from hpcrl.start.training import check_together
from tests.broken_envs import faults_in
from tests.job_runner import run_to_end, status_of
from tests.jobs.test_end_to_end import write_config
from tests.loopback_job import JobRun
from tests.small import config_of

ISOLATED = {"isolation": "process", "step_timeout_s": 4.0, "max_restarts_per_hour": 1000}
TRANSPORT = {"deadline_s": 200.0}
FAULTS = ["raise", "segfault", "nan", "reward", "shape", "hang"]


def broken(log, **options):
    return {
        "name": "tests.broken_envs:make",
        "options": {"log": str(log), "faults": FAULTS, "mean_steps": 60, **options},
        **ISOLATED,
    }


LAYOUTS = {
    "seed": ({"learners": 1, "inference": 1, "actors": 2}, {}),
    "impala": ({"learners": 1, "inference": 0, "actors": 2}, {}),
    "sync": ({"learners": 1, "inference": 1, "actors": 2}, {"agent": {"name": "ppo"}}),
}


def check_unroll(unroll, truncate, length):
    """All of an unroll is of one life of one environment, and each row follows from the last."""
    observed = unroll["obs:obs"]
    assert len(set(observed[:, 0])) == 1, "an unroll crosses a restart"
    for t in range(len(observed) - 1):
        _, episode, step = observed[t].tolist()
        after = observed[t + 1].tolist()[1:]
        if unroll["final"][t]:
            assert truncate
            assert step == length
            assert after == [episode + 1, 0]
            assert unroll["reward"][t + 1] == 0
            assert unroll["start"][t + 1]
            continue
        ended = step + 1 == length
        assert unroll["reward"][t + 1] == step + 1
        assert unroll["terminated"][t + 1] == (ended and not truncate)
        assert after == ([episode + 1, 0] if ended and not truncate else [episode, step + 1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_learners_get_no_step_that_did_not_happen(tmp_path, monkeypatch, layout, truncate):
    log = tmp_path / "faults"
    topology, sections = LAYOUTS[layout]
    config = config_of(
        layout=layout,
        run={"dir": str(tmp_path / "run")},
        env={**broken(log, truncate=truncate), "envs_per_actor": 4, "groups": 2},
        topology=topology,
        learner={"batch_unrolls": 8, "unroll_steps": 5, "backend": "mpi"},
        stop={"agent_steps": 800},
        transport=TRANSPORT,
        **sections,
    )
    run = JobRun(monkeypatch).start(config, sum(topology.values()))
    assert set(run.codes) == {DONE}
    assert len(run.all_unrolls) * 5 >= 800
    for unroll in run.all_unrolls:
        check_unroll(unroll, truncate, 7)
    status = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert status["env_restarts"] == faults_in(log)
    assert sum(status["env_restarts"].values()) >= 3
    last = read_metrics(tmp_path / "run")[-1]
    assert last["env_restarts"] == sum(last[f"env_restarts_{k}"] for k in status["env_restarts"])
    # The last failure may be answered with STOP, so that nobody acts on the row made anew.
    assert 0 < last["restarted_envs"] <= 2 * last["env_restarts"]
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_real_job_reaches_its_goal_over_every_kind_of_failure(tmp_path):
    log = tmp_path / "faults"
    env = {**broken(log, mean_steps=150), "envs_per_actor": 4, "groups": 2}
    config, run_dir = write_config(
        tmp_path,
        env=env,
        topology={"learners": 1, "inference": 1, "actors": 2},
        stop={"agent_steps": 4000},
        transport=TRANSPORT,
    )
    code, output = run_to_end(config, timeout_s=250)
    assert code == DONE, output
    status, broke = status_of(run_dir), faults_in(log)
    assert status["verdict"] == "stop.agent_steps 4000 reached"
    assert status["env_restarts"] == broke
    assert all(broke.values()), broke
    assert "environments restarted" in output
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in str(p.info["cmdline"])]
    assert not mine


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["seed", "impala"])
def test_environments_that_fail_too_often_end_the_job_with_a_code_of_its_own(tmp_path, layout):
    env = {**broken(tmp_path / "faults", faults=["raise"], mean_steps=3), "envs_per_actor": 4}
    topology = LAYOUTS[layout][0]
    config, _ = write_config(
        tmp_path, env={**env, "max_restarts_per_hour": 2}, topology=topology, transport=TRANSPORT
    )
    code, output = run_to_end(config, "--layout", layout)
    assert code == ENVIRONMENTS, output
    assert "tests.broken_envs:make: its environments failed 3 times within an hour" in output
    assert "3 raised since the start" in output
    assert "ValueError: this environment broke on purpose" in output


def test_a_batch_script_does_not_start_such_a_job_again():
    attempts = [Attempt("1", ENVIRONMENTS, 500)]
    assert judge({"state": "running"}, attempts)[:2] == ("stop", ENVIRONMENTS)


def test_settings_that_make_no_sense_together_are_refused():
    with pytest.raises(ConfigError, match=r"env\.python is /x.*set env\.isolation to process"):
        check_together(config_of(env={"python": "/x", "envs_per_actor": 2, "groups": 1}))
    env = {"isolation": "process", "step_timeout_s": 30.0, "start_timeout_s": 30.0}
    with pytest.raises(ConfigError, match=r"reach transport\.deadline_s 60"):
        check_together(config_of(env={**env, "envs_per_actor": 2, "groups": 1}))
    env |= {"envs_per_actor": 2, "groups": 1, "step_timeout_s": 15.0}
    check_together(config_of(env=env, run={"silence_timeout_s": 46.0}))
    check_together(config_of(env=env, run={"silence_timeout_s": 0.0}))
    with pytest.raises(ConfigError, match=r"15 and .* 30 together reach run\.silence_timeout_s 45"):
        check_together(config_of(env=env, run={"silence_timeout_s": 45.0}))


def test_the_kinds_of_failures_have_one_order_on_both_sides():
    from env_wrappers import FAILURE_KINDS
    from hpcrl.specs import ENV_FAILURES

    assert FAILURE_KINDS == ENV_FAILURES
