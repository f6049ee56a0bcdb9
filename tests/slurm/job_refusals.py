"""What a job can't do: each ends with the code and the words of slurm/README.md."""

import contextlib
import os
import subprocess
import sys

import pytest

from hpcrl.run.checkpoint import load_latest
from tests.slurm.batch_job import WHEEL_SITE, BatchJob
from tests.slurm.job_lifecycle import LONG, SHAPE, check_continuous

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder):
    """Fill the file system that `folder` is on."""
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**16)):
            pass


def test_a_run_directory_of_someone_else_ends_with_2_and_names_it(cluster, tmp_path):
    python = tmp_path / "python.sh"
    # Root may write everywhere, but for a root without these rights.
    python.write_text(
        "#!/bin/sh\nexec setpriv --bounding-set=-dac_override,-dac_read_search "
        f'--inh-caps=-dac_override,-dac_read_search {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    os.chown(run, 65534, 65534)
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml"), sbatch=SHAPE, HPCRL_PYTHON=python
    )
    assert job.finish() == 2
    assert f"can't write to run directory {run} (Permission denied)" in job.output
    assert "give another --run.dir" in job.output


def test_a_full_file_system_at_the_start_ends_with_2_and_starts_nothing(
    cluster, tmp_path, small_disk
):
    fill(small_disk)
    job = BatchJob(cluster, small_disk, "train.sbatch", "counting.yaml", sbatch=SHAPE, log=tmp_path)
    assert job.finish() == 2
    assert f"can't write to run directory {job.run} (No space left on device)" in job.output
    assert "nothing was started" in job.output


def test_a_full_file_system_at_a_stop_ends_with_74_and_keeps_the_last_checkpoint(
    cluster, tmp_path, small_disk
):
    job = BatchJob(
        *(cluster, small_disk, "train.sbatch", "counting.yaml", *LONG),
        *("--checkpoint.pause_s", 2, "--env.options", "{episode_length: 50, step_time_s: 0.001}"),
        sbatch=SHAPE,
        log=tmp_path,
    )
    job.wait_for_checkpoint()
    fill(small_disk)
    cluster.run("scancel", "-s", "USR2", job.id)
    assert job.finish() == 74
    assert "can't be written" in job.output
    assert "No space left on device" in job.output
    (small_disk / "ballast").unlink()
    assert load_latest(job.run) is not None


def test_a_run_directory_in_which_another_job_trains_ends_with_2_and_harms_nothing(
    cluster, tmp_path
):
    arguments = (cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG)
    first = BatchJob(*arguments, sbatch=SHAPE)
    first.wait_for_checkpoint()
    (tmp_path / "logs").mkdir()
    second = BatchJob(*arguments, sbatch=SHAPE, log=tmp_path / "logs")
    assert second.finish() == 2
    assert f"{first.run} is in use" in second.output
    assert first.status["state"] == "running"
    assert first.status["restart"] == 0
    step = first.status["checkpoint_step"]
    first.wait_until(lambda: first.status["checkpoint_step"] > step, "another checkpoint")
    check_continuous(first)
    cluster.run("scancel", first.id)
    first.finish()


def test_a_site_file_that_does_not_exist_ends_with_2(cluster, tmp_path):
    missing = tmp_path / "absent.sh"
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml"), sbatch=SHAPE, HPCRL_SITE=missing
    )
    assert job.finish() == 2
    assert f"no site file {missing}" in job.output


def test_an_srun_that_leaves_each_rank_a_world_of_its_own_ends_with_71(cluster, tmp_path):
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml"),
        sbatch=("--nodes=1", "--ntasks-per-node=4"),
        HPCRL_SITE=WHEEL_SITE,
        HPCRL_SRUN_MPI="none",
    )
    assert job.finish() == 71
    assert "says 4 ranks, but MPI's world has 1. The ranks did not find each other" in job.output
    assert "give srun the --mpi that this MPI library needs" in job.output
    assert not (job.run / "metrics.jsonl").exists()


def test_a_node_that_is_down_from_the_start_is_passed_over(cluster, tmp_path):
    cluster.run("scontrol", "update", "nodename=m1", "state=down", "reason=test")
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml", "--stop.agent_steps", 6_400),
        sbatch=SHAPE,
    )
    assert job.finish() == 0
    assert job.fields["NodeList"] == "m[2-3]"
