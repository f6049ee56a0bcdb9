"""Launch variables as Slurm, Open MPI and MPICH set them; every table is a real shape of them."""

import re
import time
from datetime import datetime, timezone

import pytest

from hpcrl.node.slurm_env import (
    LaunchError,
    check_world_size,
    is_launched,
    parse_time_unix_s,
    read_launch_info,
)

# What a batch script sees before it starts anything: rank variables of one task, no step.
BATCH = {
    "SLURM_JOB_ID": "417",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURMD_NODENAME": "node3",
}
# A task of `srun -n 8 --mpi=pmix` in that job.
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "PMIX_RANK": "5",
}
# salloc's shell on the first node (LaunchParameters=use_interactive_step): 0xfffffffa.
INTERACTIVE = BATCH | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "PMIX_RANK": "0",
}
# `srun --pty bash`.
PTY = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PTY_PORT": "37711",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "PMIX_RANK": "2",
}
HYDRA = {
    "PMI_SIZE": "4",
    "PMI_RANK": "2",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "4",
    "HYDI_CONTROL_FD": "7",
}
# The daemon that mpirun or mpiexec started on another node by srun leaves its step behind.
DAEMON_STEP = {
    "SLURM_JOB_ID": "417",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
# `srun -n 1 a : -n 64 b`: the step counts all components, SLURM_NTASKS those of one.
HET_STEP_FIRST = STEP | {"SLURM_STEP_NUM_TASKS": "65", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
HET_STEP_SECOND = STEP | {"SLURM_STEP_NUM_TASKS": "65", "SLURM_NTASKS": "64", "SLURM_PROCID": "9"}
HETJOB = HET_STEP_SECOND | {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_1": "418"}
del HETJOB["SLURM_STEP_NUM_TASKS"]


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({}, "none"),
        (BATCH, "none"),
        (INTERACTIVE, "none"),
        (PTY, "none"),
        (STEP, "srun"),
        (HET_STEP_FIRST, "srun"),
        (STEP | {"SLURM_PTY_PORT": "37711"}, "srun"),
        (DAEMON_STEP, "srun"),
        (OPENMPI, "mpirun"),
        (BATCH | OPENMPI, "mpirun"),
        (DAEMON_STEP | OPENMPI, "mpirun"),
        (INTERACTIVE | OPENMPI, "mpirun"),
        (HYDRA, "mpiexec"),
        (DAEMON_STEP | HYDRA, "mpiexec"),
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, "mpiexec"),
        ({"PALS_RANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "4"}, "mpiexec"),
        ({"PMIX_RANK": "0"}, "pmi"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "pmi"),
    ],
)
def test_launcher_is_told_apart_from_shells_and_scripts_inside_a_job(env, launcher):
    assert read_launch_info(env).launcher == launcher
    assert is_launched(env) == (launcher != "none")


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({}, 1),
        (BATCH, 8),
        (STEP, 8),
        (OPENMPI, 4),
        (HYDRA, 4),
        (BATCH | {"SLURM_NTASKS": "4"} | OPENMPI, 4),
        # The daemon's step counts daemons, not ranks.
        (DAEMON_STEP | OPENMPI, 4),
        (DAEMON_STEP | HYDRA, 4),
        (PTY | OPENMPI, 4),
        # A shell's own single task says nothing about a world.
        (PTY, 1),
        (HET_STEP_FIRST, 65),
        (HET_STEP_SECOND, 65),
        (HETJOB, 65),
        (HETJOB, 64),
        # A component's ranks beyond its own count.
        ({k: v for k, v in STEP.items() if k != "SLURM_STEP_NUM_TASKS"} | {"SLURM_NTASKS": "4"}, 8),
        (BATCH | OPENMPI | {"HPCRL_WORLD_SIZE": "4"}, 4),
    ],
)
def test_a_world_of_the_launched_size_passes(env, size):
    assert check_world_size(read_launch_info(env), size) is None


@pytest.mark.parametrize(
    ("env", "size", "message"),
    [
        (
            STEP,
            1,
            "SLURM_STEP_NUM_TASKS says 8 ranks, but MPI's world has 1. .*give srun the --mpi",
        ),
        (STEP, 6, "SLURM_STEP_NUM_TASKS says 8 ranks, but MPI's world has 6. Start as many"),
        (STEP | {"SLURM_NTASKS": "9"}, 8, "SLURM_NTASKS says 9 ranks, but MPI's world has 8"),
        (HET_STEP_SECOND, 1, "SLURM_STEP_NUM_TASKS says 65 ranks"),
        (OPENMPI, 1, "OMPI_COMM_WORLD_SIZE says 4 ranks.*not of one kind"),
        (HYDRA, 1, "PMI_SIZE says 4 ranks.*not of one kind"),
        (BATCH | OPENMPI, 4, "SLURM_NTASKS says 8 ranks.*HPCRL_WORLD_SIZE if this is meant"),
        (INTERACTIVE | OPENMPI, 4, "SLURM_NTASKS says 8 ranks, but MPI's world has 4"),
        (BATCH, 1, "SLURM_NTASKS says 8 ranks.*No launcher started this process"),
        (OPENMPI | {"HPCRL_WORLD_SIZE": "6"}, 4, "HPCRL_WORLD_SIZE says 6 ranks"),
    ],
)
def test_a_world_of_another_size_is_explained(env, size, message):
    answer = check_world_size(read_launch_info(env), size)
    assert answer is not None
    assert re.search(message, answer), answer


def test_the_first_expectation_is_the_launchers_own():
    assert read_launch_info(BATCH | OPENMPI).expected_world_size == 4
    assert read_launch_info(STEP).expected_world_size == 8
    assert read_launch_info({}).expected_world_size is None


def test_job_facts_are_read():
    info = read_launch_info(STEP | {"SLURM_RESTART_COUNT": "3", "HPCRL_ROLE": " Learner "})
    assert (info.job_id, info.restart_count, info.node) == ("417", 3, "node3")
    assert (info.cpus_per_task, info.local_rank, info.role) == (2, 1, "learner")
    array = STEP | {"SLURM_ARRAY_JOB_ID": "400", "SLURM_ARRAY_TASK_ID": "17"}
    assert read_launch_info(array).job_id == "400_17"
    nothing = read_launch_info({})
    assert (nothing.job_id, nothing.restart_count, nothing.node) == (None, 0, "")
    assert (nothing.cpus_per_task, nothing.local_rank, nothing.role) == (None, None, None)
    assert nothing.job_end_unix_s is None


def test_local_rank_is_the_launchers_and_not_the_daemons():
    assert read_launch_info(DAEMON_STEP | OPENMPI).local_rank == 2
    assert read_launch_info(DAEMON_STEP | HYDRA).local_rank == 2
    assert read_launch_info(BATCH).local_rank is None


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("HPCRL_ROLE", "evaluator")
    assert read_launch_info().role == "evaluator"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert is_launched()


@pytest.mark.parametrize("value", ["", "auto", " AUTO "])
def test_an_empty_role_leaves_the_choice_to_the_planner(value):
    assert read_launch_info({"HPCRL_ROLE": value}).role is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HPCRL_ROLE": "actress"}, "HPCRL_ROLE='actress' is not a role: use one of learner, "),
        ({"HPCRL_WORLD_SIZE": "many"}, "HPCRL_WORLD_SIZE='many' is not a positive number"),
        ({"HPCRL_WORLD_SIZE": "0"}, "HPCRL_WORLD_SIZE='0' is not a positive number"),
        ({"HPCRL_JOB_END": "tomorrow"}, "HPCRL_JOB_END='tomorrow' is neither seconds since 1970"),
        ({"HPCRL_JOB_END": "-5"}, "HPCRL_JOB_END='-5' is not a time after 1970"),
    ],
)
def test_values_that_cannot_be_used_are_refused(env, message):
    with pytest.raises(LaunchError, match=message):
        read_launch_info(env)


def test_job_end_is_seconds_or_squeues_local_time(monkeypatch):
    monkeypatch.setenv("TZ", "Etc/GMT-2")  # two hours ahead of UTC
    time.tzset()
    try:
        noon_utc = datetime(2030, 6, 1, 12, tzinfo=timezone.utc).timestamp()
        assert parse_time_unix_s("2030-06-01T14:00:00") == noon_utc
        assert parse_time_unix_s("2030-06-01T12:00:00Z") == noon_utc
        assert parse_time_unix_s("2030-06-01T11:00:00-01:00") == noon_utc
        assert parse_time_unix_s("1906545600.5") == 1906545600.5
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("env", "end"),
    [
        ({"HPCRL_JOB_END": "1906545600"}, 1906545600.0),
        ({"SLURM_JOB_END_TIME": "1906545600"}, 1906545600.0),
        ({"HPCRL_JOB_END": "1906545600", "SLURM_JOB_END_TIME": "1906549200"}, 1906545600.0),
        ({"HPCRL_JOB_END": "N/A", "SLURM_JOB_END_TIME": "1906549200"}, 1906549200.0),
        ({"HPCRL_JOB_END": "UNLIMITED"}, None),
        ({"HPCRL_JOB_END": "", "SLURM_JOB_END_TIME": "0"}, None),
    ],
)
def test_job_end_prefers_what_the_batch_script_says(env, end):
    assert read_launch_info(env).job_end_unix_s == end
