"""An exception in any role, at any time, ends the whole job soon, with its traceback kept.

`benchmarks/failures.py` does it for every role and phase.
"""

import os
import re
import time

import pytest

from hpcrl.run.checkpoint import list_checkpoints, load_latest
from hpcrl.run.heartbeat import read_beats
from hpcrl.run.run_dir import RunDir
from tests.breaking_job import BREAK, PROGRAM, WORDS, broken_at
from tests.job_runner import TrainingJob, status_of
from tests.jobs.test_end_to_end import BASE, write_config

SOON_S = 60.0  # seen: a few seconds; a busy host is given much more


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("role", "phase"),
    [("actor", "start-up"), ("evaluator", "mid-run"), ("inference", "shut-down")],
)
def test_an_exception_ends_the_job_with_its_traceback_and_the_last_checkpoint(
    tmp_path, role, phase
):
    goal = 600 if phase == "shut-down" else 10**9
    config, run_dir = write_config(
        tmp_path,
        env={"name": "gym:CartPole-v1", "options": {}},
        topology={**BASE["topology"], "evaluators": 1},
        evaluation={"episodes": 2, "envs": 2, "every_s": 0.5},
        checkpoint={"every_s": 0.5},
        stop={"agent_steps": goal},
    )
    environment = {"BREAK_AT": f"{role}/{phase}"}
    with TrainingJob(config, program=(*PROGRAM, "train"), env=environment) as job:
        if phase == "mid-run":
            job.wait_until(lambda: list_checkpoints(run_dir), "checkpoint")
            (victim,) = [beat for beat in read_beats(run_dir) if beat.name == f"{role} 0"]
            os.kill(victim.pid, BREAK)
        code = job.finish()
        over_s = time.time() - broken_at(job.output)
        print(f"{role} {phase}: over in {over_s:.1f} s")
        assert over_s < SOON_S
        assert code == 70
        assert re.search(rf"{role} 0 \(rank \d+\) failed\s+Traceback", job.output)
        assert f"RuntimeError: {WORDS}" in job.output
    logs = "".join(path.read_text() for path in RunDir(run_dir).logs.glob("rank-*.log"))
    assert f"RuntimeError: {WORDS}" in logs
    status = status_of(run_dir)
    assert status["state"] == "failed"
    assert status["verdict"].startswith(f"{role} 0 ")
    if phase != "start-up":
        assert load_latest(run_dir) is not None
