"""Every launch shape gives the same job: one world, the planned roles, exit code 0."""

import json
import sys

import pytest

from tests.slurm.batch_job import BatchJob
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
    site = tmp_path / "wheel.sh"
    site.write_text("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
                    "export OMP_NUM_THREADS=1\n"
                    'HPCRL_MPIRUN_OPTIONS="--oversubscribe --bind-to none"\n')  # fmt: skip
    job = BatchJob(
        *(cluster, tmp_path, "train_mpirun.sbatch", "counting.yaml"),
        *("--stop.agent_steps", 400_000),
        sbatch=("--nodes=1", "--ntasks-per-node=4"),
        HPCRL_SITE=site,
    )
    job.wait_for_checkpoint()
    cluster.run("scancel", "--batch", "-s", "USR2", job.id)
    job.start_again()
    assert job.finish() == 0
    assert job.status["counters"]["learner_steps"] == 1250


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_the_gpus_that_slurm_gives_are_the_gpus_that_are_planned(cluster, gpus):
    code = (
        "import os; from hpcrl.node.devices import visible_gpus; "
        "print(len(visible_gpus(os.environ, 2)) if 'CUDA_VISIBLE_DEVICES' in os.environ else 0)"
    )
    request = (f"--gpus-per-node={gpus}",) if gpus else ()
    out = cluster.run("srun", "-Q", "--mpi=none", "-n1", *request, sys.executable, "-c", code)
    assert int(out) == gpus
