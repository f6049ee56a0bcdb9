"""What happens to a run on a cluster, by real jobs of a real Slurm."""

import json

import psutil
import pytest
import yaml

from tests.mpi_runner import ROOT
from tests.slurm.batch_job import BatchJob, Job, submission

pytestmark = pytest.mark.timeout(600)

SHAPE = ("--nodes=2", "--ntasks-per-node=2")
LONG = ("--stop.agent_steps", 400_000)  # 400 000 / 320 = 1 250 learner steps
SHORT = ("--stop.agent_steps", 6_400)  # 20 learner steps


def check_continuous(job):
    """Counters only grow, and no learner step was done twice or left out."""
    steps = [record["learner_steps"] for record in job.metrics]
    assert steps == sorted(steps)
    for record in job.metrics:
        assert record["agent_steps"] == 320 * record["learner_steps"]
        assert record["frames"] == record["agent_steps"]


def test_cartpole_trains_to_475_by_srun(cluster, tmp_path):
    shape = ("--nodes=1", "--ntasks-per-node=4")
    job = BatchJob(cluster, tmp_path, "train.sbatch", "cartpole_vtrace.yaml", sbatch=shape)
    assert job.finish(timeout_s=380) == 0
    assert job.status["state"] == "done"
    assert job.status["mean_return_100"] >= 475


def test_a_stopped_job_is_requeued_and_ends_with_the_counters_of_an_unbroken_run(cluster, tmp_path):
    job = BatchJob(cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG, sbatch=SHAPE)
    job.wait_for_checkpoint()
    cluster.run("scancel", "-s", "USR2", job.id)
    job.start_again()
    assert job.finish() == 0
    assert job.status["state"] == "done"
    assert job.status["counters"]["learner_steps"] == 1_250
    check_continuous(job)
    assert {record["restart"] for record in job.metrics} == {0, 1}
    assert "signal SIGUSR2" in job.output


def test_a_node_that_goes_down_costs_no_more_than_the_steps_since_the_checkpoint(cluster, tmp_path):
    """The ranks of the other node are too few, so the job is requeued."""
    job = BatchJob(cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG, sbatch=SHAPE)
    job.wait_for_checkpoint()
    cluster.run("scontrol", "update", "nodename=m2", "state=down", "reason=test")
    job.start_again()
    assert job.finish() == 0
    assert job.fields["NodeList"] == "m[1,3]"
    assert "1 of 2 nodes are left" in job.output
    assert job.status["counters"]["learner_steps"] == 1_250
    assert job.status["resumed_learner_step"] > 0
    check_continuous(job)


def test_a_job_goes_on_with_the_nodes_that_are_left_when_they_are_enough(cluster, tmp_path):
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG, "--topology.actors", "auto"),
        sbatch=("--nodes=3", "--ntasks-per-node=2"),
    )
    job.wait_for_checkpoint()
    assert "6 ranks on 1 node: 1 learner, 1 inference rank, 4 actors" in job.output
    cluster.run("scontrol", "update", "nodename=m3", "state=down", "reason=test")
    assert job.finish() == 0
    assert job.fields["Restarts"] == "0"
    assert "2 of 3 nodes are left" in job.output
    assert "4 ranks on 1 node: 1 learner, 1 inference rank, 2 actors" in job.output
    assert job.status["resumed_learner_step"] > 0
    assert job.status["counters"]["learner_steps"] == 1_250
    check_continuous(job)


def test_a_job_whose_nodes_go_down_without_progress_takes_no_more_of_them(cluster, tmp_path):
    """Slurm itself requeues it, as its batch script is gone; the first start left checkpoint 0."""
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG, "--checkpoint.every_s", 1e6),
        sbatch=("--nodes=1", "--ntasks-per-node=4"),
        HPCRL_MAX_FRUITLESS=1,
    )
    for restarts in range(2):
        job.wait_until(
            lambda: (
                job.status.get("state") == "running" and job.status["restart"] == restarts  # noqa: B023
            ),
            "training",
        )
        node = job.fields["BatchHost"]
        cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        job.start_again(restarts + 1)
    assert job.finish() == 137
    assert "1 launches in a row ended without a newer checkpoint" in job.output


def test_without_a_signal_a_job_stops_by_its_own_clock_and_is_requeued(cluster, tmp_path):
    """Slurm tells the batch script when the job ends; here two minutes from the start."""
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml"),
        *("--stop.agent_steps", 10**9, "--run.deadline_lead_s", 90),
        sbatch=("--nodes=1", "--ntasks-per-node=4", "--time=2", "--signal=URG@1"),
    )
    job.wait_until(lambda: "requeues job" in job.output, "requeue", 180.0)
    assert job.status["verdict"] == "the deadline is near"
    assert job.status["checkpoint_step"] == job.status["counters"]["learner_steps"] > 0
    assert "TIME LIMIT" not in job.output


def test_a_job_whose_output_cannot_be_written_is_requeued_all_the_same(cluster, tmp_path):
    options = (*LONG, f"--run.dir={tmp_path / 'run'}")
    (id_,) = cluster.run(
        *("sbatch", "--parsable", *submission("/dev/full"), *SHAPE),
        *map(str, (ROOT / "slurm" / "train.sbatch", ROOT / "configs" / "counting.yaml")),
        *map(str, ("--learner.backend", "mpi", *options)),
    ).split()
    job = Job(cluster, tmp_path / "run", tmp_path / "output", id_)
    job.wait_for_checkpoint()
    cluster.run("scancel", "-s", "USR2", job.id)
    job.start_again()
    job.wait_until(lambda: job.status["restart"] == 1, "restart")


@pytest.mark.parametrize("way", ["option", "configuration"])
def test_the_run_directory_is_where_it_was_asked_for(cluster, tmp_path, way):
    run, config = tmp_path / "a run", tmp_path / "job.yaml"
    data = yaml.safe_load((ROOT / "configs" / "counting.yaml").read_text())
    data["run"] = {"dir": str(run if way == "configuration" else tmp_path / "other")}
    config.write_text(yaml.safe_dump(data))
    options = (f"--run.dir={run}",) if way == "option" else ()
    (id_,) = cluster.run(
        *("sbatch", "--parsable", *submission(tmp_path / "output"), *SHAPE),
        *map(str, (ROOT / "slurm" / "train.sbatch", config, "--learner.backend", "mpi")),
        *(*map(str, SHORT), *options),
    ).split()
    job = Job(cluster, run, tmp_path / "output", id_)
    assert job.finish() == 0
    assert job.status["state"] == "done"
    assert not (tmp_path / "other").exists()


def test_a_killed_rank_is_made_up_for_inside_the_allocation(cluster, tmp_path):
    job = BatchJob(cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG, sbatch=SHAPE)
    job.wait_for_checkpoint()
    ranks = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(job.run) in (process.info["cmdline"] or ())
        and "mpi4py" in process.info["cmdline"]
        and "srun" not in process.info["cmdline"]
    ]
    max(ranks, key=lambda process: process.pid).kill()
    assert job.finish() == 0
    assert job.fields["Restarts"] == "0"
    assert job.status["restart"] == 1
    check_continuous(job)


def test_a_job_without_progress_stops_itself_and_says_so(cluster, tmp_path):
    # Debian's Open MPI can't start under this kind of launch.
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml"),
        sbatch=SHAPE,
        HPCRL_SRUN_MPI="pmi2",
    )
    job.start_again()
    assert job.finish() not in (0, 75)
    assert "2 launches in a row ended without a newer checkpoint" in job.output
    attempts = (job.run / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in attempts] == ["requeue", "stop"]


def test_a_world_of_another_size_than_was_launched_ends_with_71(cluster, tmp_path):
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml"), sbatch=SHAPE, HPCRL_WORLD_SIZE=7
    )
    assert job.finish() == 71
    assert "HPCRL_WORLD_SIZE says 7 ranks, but MPI's world has 4" in job.output


def test_without_scontrol_the_checkpoint_is_kept_and_the_way_on_is_named(cluster, tmp_path):
    site = tmp_path / "site.sh"
    site.write_text('. "$HPCRL_HOME/tests/slurm/debian_openmpi.sh"\nscontrol() { return 127; }\n')
    job = BatchJob(
        *(cluster, tmp_path, "train.sbatch", "counting.yaml", *LONG), sbatch=SHAPE, HPCRL_SITE=site
    )
    job.wait_for_checkpoint()
    cluster.run("scancel", "-s", "USR2", job.id)
    assert job.finish() == 75
    assert f"submit again with HPCRL_RUN_DIR={job.run}" in job.output
    assert job.status["state"] == "requeue"


def test_a_finished_run_that_is_submitted_again_ends_with_0_and_trains_nothing(cluster, tmp_path):
    job = BatchJob(cluster, tmp_path, "train.sbatch", "counting.yaml", *SHORT, sbatch=SHAPE)
    assert job.finish() == 0
    before = (job.run / "STATUS.json").read_bytes()
    again = BatchJob(cluster, tmp_path, "train.sbatch", "counting.yaml", *SHORT, sbatch=SHAPE)
    assert again.finish() == 0
    assert "is done (stop.agent_steps 6400 reached)" in again.output
    assert (job.run / "STATUS.json").read_bytes() == before
