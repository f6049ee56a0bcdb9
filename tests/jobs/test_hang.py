"""A rank that stands still is named, everyone's stacks are kept, and the job ends to be resumed."""

import os
import re
import signal
import subprocess
import sys

import pytest

from hpcrl.run.checkpoint import list_checkpoints
from hpcrl.run.heartbeat import read_beats
from hpcrl.run.metrics import read_metrics
from hpcrl.start.local_launch import find_mpirun, launch_environment
from tests.job_runner import TrainingJob, run_to_end, status_of
from tests.jobs.test_end_to_end import BASE, SLOW, write_config
from tests.mpi_runner import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]

IMPALA: dict = {
    "layout": "impala",
    "topology": {"learners": 1, "actors": 1, "inference": 0},
    "env": {"name": "gym:CartPole-v1", "options": {}},
}


TEAMS: dict = {
    "topology": {"learners": 1, "inference": 1, "actors": 1},
    "env": {"name": "tests.shared_env:make", "options": {}, "ranks_per_env": 2},
}
EVALUATED: dict = {
    "topology": {"learners": 1, "inference": 1, "actors": 1, "evaluators": 1},
    "env": {"name": "gym:CartPole-v1", "options": {}},
    "evaluation": {"episodes": 2, "envs": 2, "every_s": 0.1},
}
ASYNC: dict = {
    "layout": "async_gradient",
    "agent": {"name": "a3c"},
    "topology": {"learners": 2, "inference": 0, "actors": 2},
    "env": {"name": "gym:CartPole-v1", "options": {}},
}
NEEDS = {
    "worker": IMPALA,
    "follower": TEAMS,
    "evaluator": EVALUATED,
    "parameter server": ASYNC,
    "gradient worker": ASYNC,
}
TITLES = {"parameter server": "learner", "gradient worker": "worker"}
"""What the topology calls a role that has another name here."""


def hpcrl(*arguments):
    result = subprocess.run(
        [sys.executable, "-m", "hpcrl", *map(str, arguments)],
        capture_output=True, text=True, timeout=100, cwd=ROOT, check=False,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


def start(folder, **sections):
    return write_config(
        folder,
        **{
            "env": SLOW,
            "run": {"dir": str(folder / "run"), "silence_timeout_s": 8},
            "checkpoint": {"every_s": 0.1},
            "stop": {"agent_steps": 10**9},
            **sections,
        },
    )


@pytest.mark.parametrize("role", ["learner", "inference", "actor", *NEEDS])
def test_a_stopped_rank_is_named_and_the_job_ends_and_can_be_resumed(tmp_path, role):
    config, run_dir = start(tmp_path, **NEEDS.get(role, {}))
    title = TITLES.get(role, role)
    with TrainingJob(config) as job:
        job.wait_until(lambda: any(n for n, _ in list_checkpoints(run_dir)), "checkpoint")
        # While it starts it has the whole time of a start.
        job.wait_until(lambda: all(b.stage != "start" for b in read_beats(run_dir)), "stages")
        (victim,) = [b for b in read_beats(run_dir) if b.name == f"{title} 0"]
        others = {beat.rank for beat in read_beats(run_dir)} - {victim.rank}
        os.kill(victim.pid, signal.SIGSTOP)
        named = f"{title} 0 (rank {victim.rank}, {victim.host}, pid {victim.pid}, stopped) silent"
        job.wait_until(lambda: named in hpcrl("status", run_dir)[1], "name in status")
        assert job.finish() == 70
        assert named in job.output
    status = status_of(run_dir)
    assert status["state"] == "failed"
    assert named in status["verdict"]
    answers = {path.name for path in (run_dir / "logs" / "stacks").glob("*/rank-*")}
    # The stopped one may answer, too, when it is woken up to be ended.
    assert answers >= {f"rank-{rank:05d}" for rank in others}
    goal = (list_checkpoints(run_dir)[0][0] + 5) * 20
    code, output = run_to_end(config, "--stop.agent_steps", goal)
    assert code == 0, output
    status = status_of(run_dir)
    assert (status["state"], status["restart"]) == ("done", 1)
    assert status["resumed_learner_step"] > 0


def test_a_rank_that_never_comes_to_mpi_does_not_keep_the_others(tmp_path):
    """The other one waits inside MPI, where no rank's own code runs."""
    config, run_dir = start(tmp_path)
    program = (
        "import sys; from hpcrl.start import training; training._START_S = 15.0; "
        f"training.train_command({str(config)!r}, [])"
    )
    done = subprocess.run(
        [
            *(find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", "1"),
            *(sys.executable, "-m", "mpi4py", "-c", program),
            *(":", "-n", "1", "sleep", "100000"),
        ],
        capture_output=True, text=True, timeout=200, cwd=ROOT, check=False,
        env=launch_environment(2),
    )  # fmt: skip
    assert done.returncode not in (0, 75)
    assert "Timeout (0:00:15)!" in done.stderr
    assert re.search(r'File ".*transport.py"', done.stderr)
    assert not (run_dir / "STATUS.json").exists()


def test_stacks_of_a_running_job_show_every_rank(tmp_path):
    config, run_dir = start(tmp_path, stop={"agent_steps": 10**9})
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        code, output = hpcrl("stacks", run_dir)
        assert code == 0, output
        for rank, role in enumerate(("learner", "inference", "actor")):
            assert f"{role} 0 (rank {rank}, " in output
            assert f"hpcrl/roles/{role}.py" in output
        (actor,) = [b for b in read_beats(run_dir) if b.name == "actor 0"]
        os.kill(actor.pid, signal.SIGSTOP)
        code, output = hpcrl("stacks", run_dir, "--wait-s", 1)
        assert code == 70
        assert re.search(r"no answer: actor 0 \(rank 2, .*, stopped\)", output)
        assert "hpcrl/roles/learner.py" in output


def test_a_run_that_is_over_has_no_stacks(tmp_path):
    config, run_dir = start(tmp_path, env=BASE["env"], stop={"agent_steps": 200})
    assert run_to_end(config)[0] == 0
    code, output = hpcrl("stacks", run_dir)
    assert code == 2
    assert "nothing runs there (STATUS.json: done)" in output
    assert hpcrl("stacks", tmp_path)[0] == 2
