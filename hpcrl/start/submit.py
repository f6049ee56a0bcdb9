"""`hpcrl submit`: a batch script for one run, shown, and submitted only when asked."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl import exit_codes

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
_WORD = re.compile(r"[\w.-]+")


class SubmitError(ValueError):
    """What was asked for is no job; the message says what to give instead."""


@dataclass(frozen=True)
class JobRequest:
    """What the user asks of Slurm.

    Attributes:
      config: path of the configuration.
      nodes: of the allocation.
      time: wall limit as sbatch takes it, such as 24:00:00 or 2-00.
      ranks_per_node: MPI ranks on each node.
      gpus_per_node: GPUs of each node.
      cpus_per_rank: cores of each rank.
      site: name or path of a site file; "": none.
      lead_s: seconds before the wall limit at which Slurm asks for the stop.
      overrides: options of `hpcrl train`.
      sbatch: further options of sbatch, such as --partition=gpu.
    """

    config: str
    nodes: int
    time: str
    ranks_per_node: int
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    site: str = ""
    lead_s: int = 300
    overrides: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()


def render(request: JobRequest, home: str) -> str:
    """Return the batch script; it depends on nothing else than its arguments.

    Args:
      request: what the user asks for.
      home: hpcrl's checkout on the cluster, where slurm/lib.sh is.

    Raises:
      SubmitError: a number, the time or an option can't be used.
    """
    _check(request)
    name = Path(request.config).stem
    options = [
        f"--job-name={name if _WORD.fullmatch(name) else 'hpcrl'}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks_per_node}",
        f"--cpus-per-task={request.cpus_per_rank}",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        f"--time={request.time}",
        f"--signal=USR2@{request.lead_s}",
        "--requeue",
        "--open-mode=append",
        *request.sbatch,
    ]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]
    lines += ["set -euo pipefail", "", f"export HPCRL_HOME={shlex.quote(home)}"]
    if request.site:
        lines.append(f"export HPCRL_SITE={shlex.quote(request.site)}")
    arguments = shlex.join([request.config, *request.overrides])
    lines += ['. "$HPCRL_HOME/slurm/lib.sh"', f"hpcrl_prepare {arguments}", "hpcrl_run hpcrl_srun"]
    return "\n".join(lines) + "\n"


def _check(request: JobRequest) -> None:
    for name in ("nodes", "ranks_per_node", "cpus_per_rank"):
        if getattr(request, name) < 1:
            raise SubmitError(f"{name} must be at least 1, got {getattr(request, name)}")
    if not _TIME.fullmatch(request.time):
        raise SubmitError(
            f"time {request.time!r} is no time of sbatch: give minutes, H:MM:SS or D-HH"
        )
    for option in request.sbatch:
        # A line break would end the line of options and begin the script.
        if not option.startswith("-") or "\n" in option:
            raise SubmitError(f"{option!r} is no option of sbatch, such as --partition=gpu")


def _check_site(site: str, home: Path) -> None:
    """The batch script finds it by the same rule, but only after the queue."""
    folder = home / "slurm" / "sites"
    path = Path(site) if "/" in site else folder / f"{site}.sh"
    if site and not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.sh")))
        raise SubmitError(f"no site file {path}: give a path with a slash, or one of {names}")


def submit_command(request: JobRequest, home: Path, dry_run: bool) -> int:
    """Show the script; submit it unless `dry_run`. Return the exit code."""
    try:
        _check_site(request.site, home)
        script = render(request, str(home))
    except SubmitError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return exit_codes.USAGE
    print(script, end="", flush=True)
    if dry_run:
        return exit_codes.DONE
    if shutil.which("sbatch") is None:
        print(
            "hpcrl: no sbatch on PATH: nothing was submitted; on a machine of the cluster, "
            "give the script above to sbatch",
            file=sys.stderr,
        )
        return exit_codes.LAUNCH
    return _sbatch(["sbatch"], script)


def _sbatch(command: Sequence[str], script: str) -> int:
    done = subprocess.run(command, input=script, text=True, check=False)
    return exit_codes.DONE if done.returncode == 0 else exit_codes.LAUNCH
