"""`hpcrl submit`: a batch script for one run, shown, and submitted only when asked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def render(request: JobRequest, home: str, python: str = "") -> str:
    """Return the batch script; it depends on nothing else than its arguments.

    Args:
      request: what the user asks for.
      home: hpcrl's checkout on the cluster, where slurm/lib.sh is.
      python: interpreter with hpcrl; empty: the one of the checkout.

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
        "--no-kill",
        "--open-mode=append",
        *request.sbatch,
    ]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]
    lines += ["set -euo pipefail", "", f"export HPCRL_HOME={shlex.quote(home)}"]
    if python:
        lines.append(f"export HPCRL_PYTHON={shlex.quote(python)}")
    if request.site:
        lines.append(f"export HPCRL_SITE={shlex.quote(request.site)}")
    arguments = shlex.join([request.config, *request.overrides])
    lines += ['. "$HPCRL_HOME/slurm/lib.sh"', f"hpcrl_prepare {arguments}", "hpcrl_run hpcrl_srun"]
    return "\n".join(lines) + "\n"


def _check(request: JobRequest) -> None:
    least = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_node": 0, "lead_s": 1}
    for name, bound in least.items():
        if getattr(request, name) < bound:
            raise SubmitError(f"{name} must be at least {bound}, got {getattr(request, name)}")
    if not _TIME.fullmatch(request.time):
        raise SubmitError(
            f"time {request.time!r} is no time of sbatch: give minutes, H:MM:SS or D-HH"
        )
    limit_s = _seconds(request.time)
    if not limit_s:
        raise SubmitError(f"time {request.time!r} is no limit in which anything could be trained")
    if request.lead_s >= limit_s:
        raise SubmitError(
            f"lead_s {request.lead_s} is not below the wall limit {request.time} ({limit_s} s): "
            "the job would be asked to stop as soon as it starts"
        )
    for option in request.sbatch:
        # A line break would end the line of options and begin the script.
        if not option.startswith("-") or "\n" in option:
            raise SubmitError(f"{option!r} is no option of sbatch, such as --partition=gpu")


def _seconds(time: str) -> int:
    """A time of sbatch: M, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash:
        parts = [0] * (len(parts) < 3) + parts  # minutes come first
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_site(site: str, home: Path) -> None:
    """The batch script finds it by the same rule, but only after the queue."""
    folder = home / "slurm" / "sites"
    path = Path(site) if "/" in site else folder / f"{site}.sh"
    if site and not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.sh")))
        raise SubmitError(f"no site file {path}: give a path with a slash, or one of {names}")


def find_home(environ: Mapping[str, str], package: Path) -> Path:
    """Return the folder with hpcrl's slurm/.

    That is HPCRL_HOME; else the checkout that runs, where an offline installation has it, or the
    current folder.

    Args:
      environ: variables.
      package: folder in which the package is: a checkout, or where packages are installed.

    Raises:
      SubmitError: none of them has it.
    """
    named = environ.get("HPCRL_HOME")
    places = [Path(named)] if named else [package, Path(sys.prefix, "share", "hpcrl"), Path.cwd()]
    for place in places:
        if (place / "slurm" / "lib.sh").is_file():
            return place.resolve()
    raise SubmitError(
        f"no slurm/lib.sh in {' or '.join(map(str, places))}: batch scripts need hpcrl's slurm/ "
        "folder; give the folder that holds it as HPCRL_HOME"
    )


def submit_command(request: JobRequest, package: Path, dry_run: bool) -> int:
    """Show the script; submit it unless `dry_run`. Return the exit code."""
    try:
        home = find_home(os.environ, package)
        _check_site(request.site, home)
        own = os.access(home / ".venv" / "bin" / "python", os.X_OK)
        python = os.environ.get("HPCRL_PYTHON", "" if own else sys.executable)
        script = render(request, str(home), python)
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
