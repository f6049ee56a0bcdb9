"""`hpcrl train` as a user starts it: real mpirun, real ranks, real signals."""

import json
import random
import re
import shutil
import signal
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from hpcrl.comm.wire import step_layout
from hpcrl.job import ACTOR_STAGES
from hpcrl.run.checkpoint import list_checkpoints, load_latest
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir
from tests.job_runner import TrainingJob, run_to_end, status_of
from tests.mpi_runner import run_mpi
from tests.small import env_spec, merged

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]

ENV = "tests.train_envs:make"
BATCH_STEPS = 4 * 5  # episodes terminate, so that every transition is real
BASE: dict[str, dict] = {
    "env": {"name": ENV, "envs_per_actor": 4, "groups": 2},
    "topology": {"learners": 1, "inference": 1, "actors": 1},
    "network": {"hidden_sizes": [8]},
    "learner": {"batch_unrolls": 4, "unroll_steps": 5},
    "stop": {"agent_steps": 1000},
    "metrics": {"every_s": 0.2, "tensorboard": False},
    "checkpoint": {"every_s": 0},
    "transport": {"deadline_s": 60.0},
}
SLOW = {"options": {"step_time_s": 0.002}}  # long enough to be stopped on the way


def write_config(folder, **sections):
    """A configuration file whose run directory is beside it; its path and the directory's."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    data = merged({**BASE, "run": {"dir": str(run_dir)}}, sections)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(data))
    return path, run_dir


def learner_steps(run_dir):
    return status_of(run_dir).get("counters", {}).get("learner_steps", 0)


def check_finished(run_dir, agent_steps=1000, restart=0):
    """A run that met its goal, with the counters of one that was never interrupted."""
    status = status_of(run_dir)
    steps = -(-agent_steps // BATCH_STEPS)
    assert status["state"] == "done"
    assert status["verdict"] == f"stop.agent_steps {agent_steps} reached"
    assert status["restart"] == restart
    counters = status["counters"]
    assert counters["learner_steps"] == steps == status["checkpoint_step"]
    assert counters["agent_steps"] == counters["frames"] == steps * BATCH_STEPS
    checkpoint = load_latest(run_dir)
    assert checkpoint.step == steps
    for name in ("learner_steps", "agent_steps", "frames"):
        assert checkpoint.state["counters"][name] == counters[name]
    check_metrics(run_dir, restart)


def check_metrics(run_dir, restarts):
    """Records go on over restarts: no step back, none doubled."""
    records = read_metrics(run_dir)
    assert records[-1]["learner_steps"] == learner_steps(run_dir)
    assert {record["restart"] for record in records} <= set(range(restarts + 1))
    for name in ("learner_steps", "agent_steps", "frames", "episodes", "wall_time_s", "restart"):
        series = [record[name] for record in records]
        assert series == sorted(series), name
    # Each report has new steps, but for the one at a run's end.
    steps = [(record["restart"], record["learner_steps"]) for record in records]
    assert len(set(steps)) >= len(steps) - 1 - restarts


def test_one_rank_of_each_role_trains_and_leaves_a_whole_run_directory(tmp_path):
    config, run_dir = write_config(tmp_path)
    code, output = run_to_end(config)
    assert code == 0, output
    check_finished(run_dir)
    status = status_of(run_dir)
    assert status["mean_return_100"] == 5.0
    assert status["mean_episode_steps_100"] == 5.0
    assert status["backend"] == "single"
    ranks = json.loads((run_dir / "topology.json").read_text())["ranks"]
    assert [rank["role"] for rank in ranks] == ["learner", "inference", "actor"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["env"]["name"] == ENV
    assert imread(run_dir / "learning_curve.png").std() > 0
    assert "stop.agent_steps 1000 reached" in output
    assert "Traceback" not in output
    assert not list((run_dir / "logs").glob("rank-*.log"))


@pytest.mark.parametrize("transport", ["compressed", "split"])
def test_step_messages_that_are_compressed_or_split_train_all_the_same(tmp_path, transport):
    # A message with final observations is in two parts, one without would be in one.
    layout = step_layout(env_spec(), BASE["env"]["envs_per_actor"] // 2, len(ACTOR_STAGES))
    sections: dict[str, dict] = {
        "compressed": {"compression": "lz4"},
        "split": {"max_message_bytes": layout.nbytes - 1},
    }
    config, run_dir = write_config(
        tmp_path,
        env={"name": "synthetic:counting", "options": {"truncate": True, "episode_length": 5}},
        transport={**sections[transport], "deadline_s": 60.0},
    )
    code, output = run_to_end(config)
    assert code == 0, output
    status = status_of(run_dir)
    assert (status["state"], status["mean_episode_steps_100"]) == ("done", 5.0)


def test_two_cells_of_uneven_load_train_together(tmp_path):
    counts = {"learners": 2, "inference": 2, "actors": 3}
    config, run_dir = write_config(tmp_path, topology=counts, learner={**BASE["learner"]})
    code, output = run_to_end(config, "--learner.check_parameters_every", 5)
    assert code == 0, output
    check_finished(run_dir)
    assert status_of(run_dir)["backend"] in ("horovod", "mpi")
    assert status_of(run_dir)["world_size"] == 7


@cache
def interrupted_run(folder):
    """A run that was asked to stop on the way and then continued to its end, and the codes."""
    config, run_dir = write_config(folder, env=SLOW)
    with TrainingJob(config) as job:
        job.wait_until(lambda: len(read_metrics(run_dir)) >= 3, "metrics")
        job.signal(signal.SIGTERM)
        first = job.finish()
    at_stop = status_of(run_dir)
    second, output = run_to_end(config)
    return run_dir, (first, second), at_stop, output


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    return interrupted_run(tmp_path_factory.mktemp("interrupted"))


def test_sigterm_stops_with_code_75_and_a_durable_checkpoint(interrupted):
    _, codes, at_stop, _ = interrupted
    assert codes[0] == 75
    assert at_stop["state"] == "requeue"
    assert re.fullmatch(r"signal SIGUSR2|signal SIGTERM", at_stop["verdict"])
    assert at_stop["checkpoint_step"] == at_stop["counters"]["learner_steps"]
    assert 0 < at_stop["counters"]["learner_steps"] < 50


def test_a_resumed_run_ends_with_the_counters_of_an_unbroken_one(interrupted):
    run_dir, codes, at_stop, output = interrupted
    assert codes[1] == 0, output
    check_finished(run_dir, restart=1)
    assert status_of(run_dir)["resumed_learner_step"] == at_stop["checkpoint_step"]
    assert f"continues at learner step {at_stop['checkpoint_step']}" in output


def copy_of(run_dir, folder, **sections):
    """The same run in another folder, as a kill just before its last STATUS.json leaves it.

    It is to be continued by a configuration of its own.
    """
    config, copied = write_config(folder, env=SLOW, **sections)
    shutil.copytree(run_dir, copied)
    RunDir(copied).update_status(state="running")
    return config, copied


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(interrupted, tmp_path):
    run_dir, _, at_stop, _ = interrupted
    config, copied = copy_of(run_dir, tmp_path)
    newest = list_checkpoints(copied)[0][1] / "tensors.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    code, output = run_to_end(config)
    assert code == 0, output
    assert "is damaged: tensors.safetensors has another SHA-256" in output
    assert f"continues at learner step {at_stop['checkpoint_step']}" in output
    check_finished(copied, restart=2)


def test_a_changed_network_is_refused_on_resume(interrupted, tmp_path):
    run_dir, _, _, _ = interrupted
    config, copied = copy_of(run_dir, tmp_path, network={"hidden_sizes": [9]})
    before = sorted(path.name for path in copied.rglob("*"))
    code, output = run_to_end(config)
    assert code == 2, output
    assert "network.hidden_sizes was [8], is [9]" in output
    assert "Traceback" not in output
    assert sorted(path.name for path in copied.rglob("*")) == before


def test_a_killed_job_can_be_resumed(tmp_path):
    """SIGKILL to every process at a random time, which may hit a checkpoint being written."""
    config, run_dir = write_config(tmp_path, env=SLOW, checkpoint={"every_s": 0.05})
    with TrainingJob(config) as job:
        job.wait_until(lambda: list_checkpoints(run_dir), "checkpoint")
        time.sleep(random.uniform(0.0, 0.5))
        job.kill()
    saved = [step for step, _ in list_checkpoints(run_dir)]
    assert saved
    code, output = run_to_end(config)
    assert code == 0, output
    check_finished(run_dir, restart=1)
    assert 0 < status_of(run_dir)["resumed_learner_step"] <= max(saved)


def test_a_rank_that_is_killed_takes_the_job_with_it(tmp_path):
    config, run_dir = write_config(tmp_path, env=SLOW, stop={"agent_steps": 10**9})
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        (actor,) = [
            process
            for process in job.processes()
            if process.environ().get("OMPI_COMM_WORLD_RANK") == "2"
        ]
        actor.kill()
        assert job.finish() not in (0, 75)


def check_failed(code, output, run_dir, who, message):
    """Code 70; the traceback of the rank that failed is in the output and in its log."""
    assert code == 70, output
    assert re.search(rf"{who} \(rank \d+\) failed", output), output
    assert "Traceback" in output
    assert message in output
    logs = "".join(path.read_text() for path in (Path(run_dir) / "logs").glob("rank-*.log"))
    assert message in logs
    assert "Traceback" in logs


def test_an_environment_that_raises_ends_the_job_with_its_traceback(tmp_path):
    config, run_dir = write_config(tmp_path, topology={**BASE["topology"], "actors": 2})
    start_s = time.monotonic()
    code, output = run_to_end(
        config, "--env.options", "{fault: raise}", "--stop.agent_steps", 10**9
    )
    assert time.monotonic() - start_s < 90
    check_failed(code, output, run_dir, "actor [01]", "this environment broke on purpose")


@pytest.mark.parametrize(
    ("role", "method"),
    [
        ("inference 0", "hpcrl.comm.slots:StepSlots.reply"),
        ("learner 0", "hpcrl.comm.unroll_flow:UnrollInbox.remove"),
    ],
)
def test_an_exception_in_a_torch_role_ends_the_job_with_its_traceback(tmp_path, role, method):
    config, run_dir = write_config(tmp_path, stop={"agent_steps": 10**9})
    result = run_mpi(
        "faulty_train.py", 3, [method, "20", str(config)], timeout_s=100.0, expect_code=None
    )
    output = result.stdout + result.stderr
    check_failed(result.returncode, output, run_dir, role, f"{method} broke on purpose")


def test_a_loss_that_is_not_finite_dumps_the_batch_and_keeps_the_last_checkpoint(tmp_path):
    options = {"fault": "reward", "at_step": 400, "step_time_s": 0.001}
    config, run_dir = write_config(
        tmp_path,
        env={**BASE["env"], "options": options},
        checkpoint={"every_s": 0.1},
        stop={"agent_steps": 10**9},
    )
    code, output = run_to_end(config)
    check_failed(code, output, run_dir, "learner 0", "after")
    assert "NonFiniteLossError: loss" in output
    with np.load(run_dir / "nan_batch_rank0.npz") as batch:
        assert batch["reward"].max() > 1e38
        assert batch["obs:obs"].shape == (6, 4, 2)
        assert {"action", "behaviour:log_prob", "core_state", "terminated"} <= set(batch.files)
    checkpoint = load_latest(run_dir)
    assert checkpoint.skipped == ()
    assert checkpoint.step > 0
    assert all(np.isfinite(tensor).all() for tensor in checkpoint.tensors.values())


def check_refused(code, output, *messages, expect=2):
    """The user's mistake in words, without a traceback."""
    assert code == expect, output
    assert "Traceback" not in output
    for message in messages:
        assert message in output


def test_an_observation_that_does_not_match_its_space_is_the_users_to_put_right(tmp_path):
    config, run_dir = write_config(tmp_path)
    code, output = run_to_end(config, "--env.options", "{fault: shape, at_step: 40}")
    message = "observation leaf 'obs': expected shape (2,), got (3,)"
    check_refused(code, output, "actor 0 (rank 2): ", message)
    assert "Traceback" in (run_dir / "logs" / "rank-00002.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["--learner.batch_unrols", "8"],
            ["unknown key learner.batch_unrols", "did you mean", "learner.batch_unrolls"],
        ),
        (["--learner.batch_unrolls", "0"], ["learner.batch_unrolls", "greater than 0"]),
        (["--topology.ranks", "2"], ["= 3 > world size 2: found 2 ranks, need at least 3"]),
        (["--learner.micro_batches", "5"], ["learner.micro_batches 5 is more than the 4"]),
        (["--stop.agent_steps", "0"], ["no stop condition is set"]),
        (["--run.deadline", "tomorrow"], ["run.deadline", "tomorrow"]),
        (["--learner.optimizer.schedule", "linear", "--stop.agent_steps", "0",
          "--stop.wall_time_s", "9"], ["learner.optimizer.schedule is linear"]),
        (["--env.name", "gym:NoSuchGame-v7"], ["NoSuchGame"]),
        (["--run.dir", "/proc/no-run"], ["can't write to run directory /proc/no-run"]),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else None,
)  # fmt: skip
def test_bad_input_is_refused_with_code_2_and_without_a_traceback(tmp_path, overrides, messages):
    config, run_dir = write_config(tmp_path)
    code, output = run_to_end(config, *overrides)
    check_refused(code, output, *messages)
    assert not (run_dir / "metrics.jsonl").exists()


def test_a_launch_whose_ranks_did_not_find_each_other_has_code_71(tmp_path):
    config, _ = write_config(tmp_path)
    steps = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    code, output = run_to_end(config, env={**steps, "SLURM_NTASKS": "4"})
    message = "says 4 ranks, but MPI's world has 1. The ranks did not find each other"
    check_refused(code, output, message, expect=71)
