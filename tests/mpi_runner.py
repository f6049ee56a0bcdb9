"""Starts a script of tests/mpi on real MPI ranks and never leaves a process behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


@cache
def _mpirun() -> list[str]:
    """The mpirun beside this Python, else the site's; with the flags that Open MPI needs."""
    path = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    assert path is not None, "no mpirun beside this Python or on PATH"
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    flags = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version.stdout else []
    return [path, *flags]


def run_mpi(
    script: str | Path,
    n: int,
    args: Sequence[str] = (),
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    *,
    expect_code: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run `script` (in tests/mpi, or an absolute path) on `n` ranks.

    Prints what the ranks printed and raises AssertionError where the exit code is not
    `expect_code` (None: any) or the time is over.
    """
    command = [*_mpirun(), "-n", str(n), sys.executable, "-m", "mpi4py"]
    command += [str(ROOT / "tests" / "mpi" / script), *args]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        },
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _end(process)
        _report(command, out, err)
        raise AssertionError(f"{script} on {n} ranks took over {timeout_s} s") from None
    except BaseException:
        _end(process)
        raise
    if expect_code is not None and process.returncode != expect_code:
        _report(command, out, err)
        raise AssertionError(f"{script} on {n} ranks ended with code {process.returncode}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ask mpirun to stop its ranks, then kill what is left of it and of them."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=5.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for child in family:
            if child.is_running():  # also compares the start time: a reused pid is not it
                child.kill()
        return process.communicate(timeout=5.0)


def _report(command: Sequence[str], out: str, err: str) -> None:
    print(" ".join(command), "--- stdout", out, "--- stderr", err, sep="\n")
