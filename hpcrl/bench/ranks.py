"""Starts the ranks of a benchmark with an mpirun of their own and takes what rank 0 found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import hpcrl
from hpcrl.start.local_launch import find_mpirun, launch_environment, mpirun_command

HOME = Path(hpcrl.__file__).resolve().parents[1]
"""The source tree: some programs are in its benchmarks/."""

_GRACE_S = 5.0


class BenchError(RuntimeError):
    """A benchmark can't be run here, or its ranks failed."""


def benchmark_script(name: str) -> Path:
    """Return a program of benchmarks/.

    Raises:
      BenchError: hpcrl was installed without its source tree.
    """
    path = HOME / "benchmarks" / name
    if not path.exists():
        raise BenchError(f"{path} is missing: run this from a clone of hpcrl's source")
    return path


def run_ranks(
    program: Sequence[str], ranks: int, arguments: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Run a Python program on `ranks` local ranks.

    Args:
      program: a script, or `-m` and a module.
      ranks: how many.
      arguments: for the program, which gets them as one JSON text, with the key `result`: the
        file that rank 0 must write.
      timeout_s: the ranks are ended after that.

    Returns:
      What rank 0 wrote.

    Raises:
      BenchError: the ranks failed, took too long or wrote nothing.
    """
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        result = Path(folder) / "result.json"
        text = json.dumps({**arguments, "result": str(result)})
        command = mpirun_command(find_mpirun(), ranks, [text], program)
        code = run_to_end(command, timeout_s, launch_environment(ranks))
        if code != 0 or not result.exists():
            raise BenchError(f"{' '.join(program)} on {ranks} ranks ended with code {code}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def run_to_end(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> int:
    """Run a command and return its exit code; nothing of it is left when it took too long.

    Raises:
      BenchError: it took over `timeout_s`.
    """
    known = dict(environment or os.environ)
    known["PYTHONPATH"] = os.pathsep.join([str(HOME), known.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, env=known, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except BaseException as error:
        end_family(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise BenchError(f"{command[0]} took over {timeout_s:.0f} s") from None
        raise


def end_family(process: subprocess.Popen[Any]) -> None:
    """Ask a process to stop, then kill what is left of it and of its children."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    process.terminate()
    psutil.wait_procs(family, _GRACE_S)
    for child in family:
        if child.is_running():
            child.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def read_arguments() -> dict[str, Any]:
    """Return, in a rank, the arguments that `run_ranks` gave."""
    found: dict[str, Any] = json.loads(sys.argv[-1])
    return found


def write_result(arguments: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Leave, on rank 0, what `run_ranks` returns."""
    Path(arguments["result"]).write_text(json.dumps(figures), encoding="utf-8")
