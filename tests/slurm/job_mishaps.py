"""A rank of each role that breaks or stands still ends its launch; the job goes on by itself."""

import os
import re
import signal
import sys

import pytest

from hpcrl.run.heartbeat import read_beats
from tests.breaking_job import BREAK, WORDS
from tests.jobs.test_hang import hpcrl
from tests.slurm.batch_job import BatchJob

pytestmark = pytest.mark.timeout(900)

ROLES = ("learner", "inference", "actor", "evaluator")
OPTIONS = (
    *("--stop.agent_steps", 10**9, "--env.options", "{episode_length: 50, step_time_s: 0.001}"),
    *("--topology.evaluators", 1, "--evaluation.episodes", 2, "--evaluation.envs", 2),
    *("--evaluation.every_s", 0.5, "--checkpoint.every_s", 0.5),
)
SHAPE = ("--nodes=2", "--ntasks-per-node=3")
START_S = 240.0


def wait_for_progress(job, restart):
    """Return the ranks of this launch once it has a checkpoint of its own."""
    job.wait_until(
        lambda: (
            job.status.get("state") == "running"
            and job.status["restart"] == restart
            and (job.status.get("checkpoint_step") or 0) > job.status["resumed_learner_step"]
            and all(beat.stage != "start" for beat in read_beats(job.run, restart))
        ),
        f"checkpoint of launch {restart}",
        START_S,
    )
    return {beat.name: beat for beat in read_beats(job.run, restart)}


def finish(cluster, job):
    """See that the job goes on after the last mishap, and end it."""
    wait_for_progress(job, len(ROLES))
    assert job.fields["Restarts"] == "0"  # all in one allocation
    steps = [record["learner_steps"] for record in job.metrics]
    assert steps == sorted(steps)
    cluster.run("scancel", job.id)
    job.finish()


def test_a_rank_that_stands_still_is_named_and_the_job_goes_on(cluster, tmp_path):
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml", *OPTIONS),
        *("--run.silence_timeout_s", 12),
        sbatch=SHAPE,
    )
    stacks = job.run / "logs" / "stacks"
    for restart, role in enumerate(ROLES):
        ranks = wait_for_progress(job, restart)
        victim = ranks.pop(f"{role} 0")
        earlier = set(stacks.glob("*/rank-*"))
        os.kill(victim.pid, signal.SIGSTOP)
        named = f"{role} 0 (rank {victim.rank}, {victim.host}, pid {victim.pid}, stopped) silent"
        job.wait_until(lambda: named in hpcrl("status", job.run)[1], "name in status")  # noqa: B023
        job.wait_until(lambda: named in job.output, "name in the output")  # noqa: B023
        answers = {path.name for path in set(stacks.glob("*/rank-*")) - earlier}
        # Whoever stands still may answer, too, when it is woken up to be ended.
        assert answers >= {f"rank-{beat.rank:05d}" for beat in ranks.values()}
    finish(cluster, job)


def test_an_exception_in_any_rank_is_in_the_output_and_the_job_goes_on(cluster, tmp_path):
    python = tmp_path / "python.sh"
    python.write_text(
        "#!/bin/bash\n"
        'arguments=("$@")\n'
        '[ "${3:-}" = mpi4py ] && arguments[4]=tests.breaking_job\n'
        f'exec {sys.executable} "${{arguments[@]}}"\n'
    )
    python.chmod(0o755)
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml", *OPTIONS),
        sbatch=SHAPE,
        HPCRL_PYTHON=python,
    )
    for restart, role in enumerate(ROLES):
        victim = wait_for_progress(job, restart)[f"{role} 0"]
        os.kill(victim.pid, BREAK)
    finish(cluster, job)
    for role in ROLES:
        assert re.search(rf"{role} 0 \(rank \d+\) failed\s+Traceback", job.output)
    assert job.output.count(f"RuntimeError: {WORDS}") >= len(ROLES)
