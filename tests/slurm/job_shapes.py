"""Every launch shape gives the same job: one world, the planned roles, exit code 0."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from hpcrl.run.heartbeat import read_beats
from tests.job_runner import status_of
from tests.mpi_runner import ROOT
from tests.slurm.batch_job import WHEEL_SITE, BatchJob, Job, submission
from tests.slurm.job_lifecycle import SHORT

pytestmark = pytest.mark.timeout(200)


def roles(job):
    return json.loads((job.run / "topology.json").read_text())


@pytest.mark.parametrize(
    ("script", "sbatch"),
    [
        ("train_het_step.sbatch", ("--nodes=2", "--ntasks-per-node=2")),
        ("train_multi_prog.sbatch", ("--nodes=1", "--ntasks-per-node=4")),
        ("train_hetjob.sbatch", ()),
    ],
)
def test_launch_shape_trains_with_the_roles_it_gives(cluster, tmp_path, script, sbatch):
    if script == "train_hetjob.sbatch":
        sbatch = ("--ntasks-per-node=2", ":", "--ntasks-per-node=2")
    job = BatchJob(cluster, tmp_path, script, "counting.yaml", *SHORT, sbatch=sbatch)
    assert job.finish() == 0
    assert job.status["state"] == "done"
    assert "4 ranks on 1 node: 1 learner, 1 inference rank, 2 actors" in job.output


def test_mpirun_inside_a_job_trains_is_stopped_by_the_batch_shell_and_is_requeued(
    cluster, tmp_path
):
    job = BatchJob(
        *(cluster, tmp_path, "train_mpirun.sbatch", "counting.yaml"),
        *("--stop.agent_steps", 400_000),
        sbatch=("--nodes=1", "--ntasks-per-node=4"),
        HPCRL_SITE=WHEEL_SITE,
    )
    job.wait_for_checkpoint()
    cluster.run("scancel", "--batch", "-s", "USR2", job.id)
    job.start_again()
    assert job.finish() == 0
    assert job.status["counters"]["learner_steps"] == 1250


def test_a_dead_actor_under_mpirun_costs_its_environments_only(cluster, tmp_path):
    job = BatchJob(
        *(cluster, tmp_path, "train_mpirun.sbatch", "counting.yaml"),
        *("--stop.agent_steps", 400_000, "--run.fault_tolerance", "ulfm"),
        sbatch=("--nodes=1", "--ntasks-per-node=4"),
        HPCRL_SITE=WHEEL_SITE,
    )
    job.wait_for_checkpoint()
    (victim,) = [beat for beat in read_beats(job.run) if beat.name == "actor 1"]
    shared = Path(psutil.Process(victim.pid).environ()["OMPI_MCA_btl_sm_backing_directory"])
    assert shared.parent == Path("/dev/shm")
    assert shared.exists()
    os.kill(victim.pid, signal.SIGKILL)
    job.wait_until(lambda: job.metrics[-1]["lost_actors"] == 1, "loss")
    assert job.finish() == 0
    assert job.status["restart"] == 0
    assert job.status["counters"]["learner_steps"] == 1250
    assert not shared.exists()


def test_roles_by_rank_refuse_a_command_that_srun_would_cut(cluster, tmp_path):
    job = BatchJob(
        *(cluster, tmp_path, "train_multi_prog.sbatch", "counting.yaml", *SHORT),
        *("--env.options", "{episode_length: 50}"),
        sbatch=("--nodes=1", "--ntasks-per-node=4"),
    )
    assert job.finish() == 2
    assert "'{episode_length: 50}' holds a space" in job.output


@pytest.mark.parametrize("sweep", [False, True])
def test_an_array_has_a_run_for_each_task(cluster, tmp_path, sweep):
    lines = tmp_path / "sweep.txt"
    lines.write_text("--run.seed 5\n--run.seed 6 --network.hidden_sizes [16]\n")
    job = BatchJob(
        *(cluster, tmp_path, "train_array.sbatch", "counting.yaml", *SHORT),
        sbatch=("--array=1-2", "--nodes=1", "--ntasks-per-node=4"),
        **({"HPCRL_SWEEP": lines} if sweep else {}),
    )
    runs = [job.run / "1", job.run / "2"]
    for run in runs:
        job.wait_until(lambda: status_of(run).get("state") == "done", "end", 150.0)  # noqa: B023
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    assert [config["run"]["seed"] for config in configs] == ([5, 6] if sweep else [1, 2])
    if sweep:
        assert [config["network"]["hidden_sizes"] for config in configs] == [[32], [16]]


def test_the_jobs_of_a_chain_go_on_with_one_run_until_it_is_done(cluster, tmp_path):
    run, output = tmp_path / "run", tmp_path / "output"
    ids = cluster.run(
        *("bash", ROOT / "slurm" / "chain.sh", "3", run),
        *(*submission(output), "--nodes=1", "--ntasks-per-node=4"),
        *(ROOT / "slurm" / "train.sbatch", ROOT / "configs" / "counting.yaml"),
        *("--stop.agent_steps", "200000", "--learner.backend", "mpi"),
    ).split()
    assert len(ids) == 3
    first, second, third = (Job(cluster, run, output, id_) for id_ in ids)
    first.wait_for_checkpoint()
    cluster.run("scancel", "-s", "USR2", first.id)
    assert first.finish() == 75
    assert "HPCRL_REQUEUE is 0" in first.output
    assert second.finish() == 0
    assert second.status["restart"] == 1
    assert second.status["counters"]["learner_steps"] == 625
    before = second.status
    assert third.finish() == 0
    assert third.status == before


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_the_gpus_that_slurm_gives_are_the_gpus_that_are_planned(cluster, gpus):
    code = (
        "import os; from hpcrl.node.devices import visible_gpus; "
        "print(len(visible_gpus(os.environ, 2)) if 'CUDA_VISIBLE_DEVICES' in os.environ else 0)"
    )
    request = (f"--gpus-per-node={gpus}",) if gpus else ()
    out = cluster.run("srun", "-Q", "--mpi=none", "-n1", *request, sys.executable, "-c", code)
    assert int(out) == gpus
