"""The one place where the variables of Slurm and other launchers are read.

MPI is the truth about ranks; these variables say what the launcher meant, so that a launch
that went wrong is noticed (a wrong `--mpi` gives every process a world of its own).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from hpcrl.topology import ROLES, Role

Launcher = Literal["none", "srun", "mpirun", "mpiexec", "pmi"]

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers batch, extern and interactive steps from here; none of them is an MPI job."""

_NO_TIME = ("", "n/a", "none", "unknown", "unlimited", "invalid", "0")


class LaunchError(ValueError):
    """A launch variable holds a value that cannot be used."""


@dataclass(frozen=True)
class LaunchInfo:
    """What the environment says about this process and its job.

    Attributes:
      launcher: who started this process: "srun"; "mpirun" (Open MPI, PRRTE); "mpiexec"
        (MPICH, Intel MPI, MVAPICH, PALS); "pmi" (another PMI server); "none".
      expected: the world size according to each variable that knows it, by its name.
      local_rank: rank on this node as the launcher counts, None when unknown.
      node: name of this node in Slurm, "" outside.
      job_id: Slurm job, "123" or "123_4" for an array task; None outside.
      restart_count: how often Slurm has requeued this job.
      job_end_unix_s: wall-clock end of the job, seconds since 1970; None when unknown.
      cpus_per_task: cores that Slurm gives each rank; None when not asked for.
      role: role override for this rank from HPCRL_ROLE; None leaves it to the planner.
    """

    launcher: Launcher
    expected: Mapping[str, int]
    local_rank: int | None
    node: str
    job_id: str | None
    restart_count: int
    job_end_unix_s: float | None
    cpus_per_task: int | None
    role: Role | None

    @property
    def expected_world_size(self) -> int | None:
        """World size that the launcher meant; None when no variable knows."""
        return next(iter(self.expected.values()), None)


def read_launch_info(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Read the launch variables from `environ`, `os.environ` when None.

    Raises:
      LaunchError: when HPCRL_ROLE, HPCRL_JOB_END or HPCRL_WORLD_SIZE cannot be understood.
    """
    env = os.environ if environ is None else environ
    launcher = _launcher(env)
    return LaunchInfo(
        launcher=launcher,
        expected=_expected(env, launcher),
        local_rank=_first_int(
            env,
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "MPI_LOCALRANKID",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "PALS_LOCAL_RANKID",
            *(("SLURM_LOCALID",) if launcher == "srun" else ()),
        ),
        node=env.get("SLURMD_NODENAME", ""),
        job_id=_job_id(env),
        restart_count=_first_int(env, "SLURM_RESTART_COUNT") or 0,
        job_end_unix_s=_job_end_unix_s(env),
        cpus_per_task=_first_int(env, "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"),
        role=_role(env),
    )


def survives_deaths(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher lets a rank die without ending the job: `mpirun --with-ft ulfm`."""
    env = os.environ if environ is None else environ
    return env.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process as an MPI rank.

    False in a batch script and in an interactive shell inside an allocation, although
    Slurm's variables are set there too.
    """
    return _launcher(os.environ if environ is None else environ) != "none"


def check_world_size(info: LaunchInfo, actual: int) -> str | None:
    """Return why MPI's world of `actual` ranks is not what was launched; None when it is.

    The caller ends the job with exit code 71.
    """
    for name, size in info.expected.items():
        if size != actual:
            return (
                f"{name} says {size} ranks, but MPI's world has {actual}. {_advice(info, actual)}"
            )
    return None


def _advice(info: LaunchInfo, actual: int) -> str:
    if info.launcher == "none":
        return "No launcher started this process: start it with srun or mpirun."
    if actual == 1 and info.launcher == "srun":
        return (
            "The ranks did not find each other: give srun the --mpi that this MPI library needs "
            "(pmix for Open MPI, pmi2 for MPICH, `srun --mpi=list` shows them), or use mpirun."
        )
    if actual == 1:
        return (
            "The ranks did not find each other: the launcher and the MPI library of mpi4py are "
            "not of one kind; `hpcrl check` prints the library."
        )
    return "Start as many ranks as the job has tasks, or set HPCRL_WORLD_SIZE if this is meant."


def _launcher(env: Mapping[str, str]) -> Launcher:
    # Inside an allocation these launchers start their daemons by srun, so Slurm's step
    # variables, then the daemon's, are set beside their own: theirs come first.
    if "OMPI_COMM_WORLD_SIZE" in env:
        return "mpirun"
    if any(
        name in env for name in ("HYDI_CONTROL_FD", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
    ) or ("PALS_RANKID" in env and "SLURM_STEP_ID" not in env):
        return "mpiexec"
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        # A shell that Slurm itself started may carry PMI variables of its one task.
        return "none" if _is_interactive_step(env) else "srun"
    return "pmi" if any(n in env for n in ("PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK")) else "none"


def _is_interactive_step(env: Mapping[str, str]) -> bool:
    """Whether the step is a shell: salloc's interactive step, or `srun --pty` of one task."""
    step = _first_int(env, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return True
    has_terminal = "SLURM_PTY_PORT" in env or "SLURM_PTY_WIN_COL" in env
    return has_terminal and _first_int(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") == 1


def _expected(env: Mapping[str, str], launcher: Launcher) -> dict[str, int]:
    if "HPCRL_WORLD_SIZE" in env:
        size = _first_int(env, "HPCRL_WORLD_SIZE")
        if size is None or size < 1:
            raise LaunchError(
                f"HPCRL_WORLD_SIZE={env['HPCRL_WORLD_SIZE']!r} is not a positive number of ranks"
            )
        return {"HPCRL_WORLD_SIZE": size}
    names = {
        "srun": ["SLURM_STEP_NUM_TASKS"],
        "mpirun": ["OMPI_COMM_WORLD_SIZE"],
        "mpiexec": ["PMI_SIZE", "MV2_COMM_WORLD_SIZE"],
        "pmi": ["PMI_SIZE", "FLUX_JOB_SIZE"],
        "none": [],
    }[launcher]
    expected = {name: size for name in names if (size := _first_int(env, name)) is not None}
    tasks = _first_int(env, "SLURM_NTASKS")
    if tasks is not None and _counts_world(env, launcher, tasks):
        expected["SLURM_NTASKS"] = tasks
    return expected


def _counts_world(env: Mapping[str, str], launcher: Launcher, tasks: int) -> bool:
    """Whether SLURM_NTASKS counts the whole world.

    It does not with components (`srun a : b`, heterogeneous jobs), where it counts those of
    one component, and not in a step that holds the daemons of mpirun or a shell.
    """
    if any("_HET_GROUP_" in name or name == "SLURM_HET_SIZE" for name in env):
        return False
    if launcher == "srun":
        if (_first_int(env, "SLURM_PROCID") or 0) >= tasks:
            return False
        # A component's count is below the step's, which is the sum of all components.
        return tasks >= (_first_int(env, "SLURM_STEP_NUM_TASKS") or 0)
    step = _first_int(env, "SLURM_STEP_ID")
    return step is None or step >= _FIRST_SPECIAL_STEP


def _job_id(env: Mapping[str, str]) -> str | None:
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID")


def _job_end_unix_s(env: Mapping[str, str]) -> float | None:
    for name in ("HPCRL_JOB_END", "SLURM_JOB_END_TIME"):
        value = env.get(name, "").strip()
        if value.lower() in _NO_TIME:
            continue
        try:
            return parse_time_unix_s(value)
        except ValueError as error:
            raise LaunchError(f"{name}={error}") from None
    return None


def parse_time_unix_s(value: str) -> float:
    """Return seconds since 1970 for Unix seconds or an ISO date and time.

    A time without a zone is local time, as squeue's `%e` prints it.

    Raises:
      ValueError: when `value` is neither.
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            # Python 3.10 reads a zone only as an offset.
            seconds = datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except ValueError:
            raise ValueError(
                f"{value!r} is neither seconds since 1970 nor a time such as 2030-12-31T23:59:00"
            ) from None
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"{value!r} is not a time after 1970")
    return seconds


def _role(env: Mapping[str, str]) -> Role | None:
    value = env.get("HPCRL_ROLE", "").strip().lower()
    if value in ("", "auto"):
        return None
    if value not in ROLES:
        raise LaunchError(f"HPCRL_ROLE={value!r} is not a role: use one of {', '.join(ROLES)}")
    return value


def _first_int(env: Mapping[str, str], *names: str) -> int | None:
    """Return the first of the variables that holds a non-negative integer."""
    for name in names:
        value = env.get(name, "").strip()
        if value.isdecimal():
            return int(value)
    return None
