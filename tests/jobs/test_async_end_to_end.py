"""`layout: async_gradient` as a user starts it: real mpirun, two servers, a worker that stops."""

import signal
from typing import Any

import pytest

from hpcrl.run.checkpoint import load_latest
from hpcrl.run.metrics import read_metrics
from tests.job_runner import TrainingJob, run_to_end, status_of
from tests.jobs.test_deaths import kill, lost_actors
from tests.jobs.test_end_to_end import check_refused, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]

ASYNC: dict[str, Any] = {
    "layout": "async_gradient",
    "agent": {"name": "a3c"},
    "env": {"name": "synthetic:counting", "envs_per_actor": 4, "groups": 2},
    "topology": {"learners": 2, "inference": 0, "actors": 2},
}


def config_with(folder, **sections):
    return write_config(folder, **{**ASYNC, **sections})


def test_two_servers_train_and_another_number_goes_on(tmp_path):
    config, run_dir = config_with(tmp_path)
    code, output = run_to_end(config)
    assert code == 0, output
    status = status_of(run_dir)
    assert status["state"] == "done"
    assert status["backend"] == "asynchronous"
    assert load_latest(run_dir).step == status["counters"]["learner_steps"]
    more = ["--stop.agent_steps", 2000, "--topology.learners", 3]
    code, output = run_to_end(config, *more)
    assert code == 0, output
    resumed = status_of(run_dir)
    assert resumed["restart"] == 1
    assert resumed["resumed_learner_step"] == status["counters"]["learner_steps"]
    assert resumed["counters"]["agent_steps"] >= 2000
    assert len(load_latest(run_dir).state["shards"]) == 3
    assert "Traceback" not in output


def test_a_worker_that_stands_still_holds_nobody_up_and_its_gradient_is_dropped(tmp_path):
    env = {**ASYNC["env"], "options": {"step_time_s": 0.0005}}
    config, run_dir = config_with(
        tmp_path, env=env, stop={"agent_steps": 10**9}, learner={"max_gradient_lag": 6}
    )

    def steps():
        return read_metrics(run_dir)[-1]["learner_steps"]

    with TrainingJob(config) as job:
        job.wait_until(lambda: len(read_metrics(run_dir)) >= 2, "metrics")
        (worker,) = [
            process
            for process in job.processes()
            if process.environ().get("OMPI_COMM_WORLD_RANK") == "3"
        ]
        worker.suspend()
        at_pause = steps()
        job.wait_until(lambda: steps() > at_pause + 40, "gradients of the other worker")
        before = read_metrics(run_dir)[-1]["dropped_gradients"]
        worker.resume()
        job.wait_until(
            lambda: read_metrics(run_dir)[-1]["dropped_gradients"] > before, "a dropped gradient"
        )
        job.signal(signal.SIGTERM)
        assert job.finish() == 75
    records = read_metrics(run_dir)
    assert max(record["gradient_lag_max"] for record in records) <= 6


def test_a_killed_worker_costs_its_environments_only(tmp_path):
    topology = {**ASYNC["topology"], "actors": 3}
    sections = {"stop": {"agent_steps": 10**9}, "topology": topology}
    run = {"dir": str(tmp_path / "run"), "fault_tolerance": "ulfm"}
    config, run_dir = config_with(tmp_path, run=run, **sections)
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        kill(run_dir, "worker 1")
        job.wait_until(lambda: lost_actors(run_dir) == 1, "loss")
        steps = read_metrics(run_dir)[-1]["learner_steps"]
        job.wait_until(
            lambda: read_metrics(run_dir)[-1]["learner_steps"] > steps + 20, "training by two"
        )
        job.signal(signal.SIGTERM)
        assert job.finish() == 75
    assert status_of(run_dir)["lost_actors"] == 1
    assert load_latest(run_dir).step == status_of(run_dir)["counters"]["learner_steps"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--learner.max_gradient_lag", "0"], "learner.max_gradient_lag is 0"),
        (["--agent.name", "apex"], "agent.name apex learns in layout: replay"),
        (["--topology.evaluators", "1"], "topology.evaluators 1: an evaluator asks one learner"),
    ],
    ids=["lag_bound", "agent", "evaluator"],
)
def test_bad_input_is_refused_with_code_2_before_mpi(tmp_path, overrides, message):
    config, run_dir = config_with(tmp_path)
    code, output = run_to_end(config, *overrides)
    check_refused(code, output, message)
    assert not run_dir.exists()
