"""Stacks of all ranks, asked for and given through the run directory.

RUN/logs/stacks/request           name of the newest request's folder
RUN/logs/stacks/NAME/rank-00003   that rank's answer, whole once it has its name
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from datetime import datetime, timezone
from pathlib import Path

from hpcrl.durable import atomic_write, reason
from hpcrl.run.run_dir import RunDirError

_REQUEST = "request"
_POLL_S = 0.05


def stacks_folder(run_dir: Path) -> Path:
    """Return where requests and answers are."""
    return run_dir / "logs" / "stacks"


def request_stacks(run_dir: Path) -> str:
    """Ask every rank of a running job for its stacks; return the request's name.

    Raises:
      RunDirError: the request can't be written.
    """
    now = datetime.now(timezone.utc)
    name = f"{now:%Y%m%d-%H%M%S}-{now.microsecond:06d}-{os.getpid()}"
    folder = stacks_folder(run_dir)
    try:
        (folder / name).mkdir(parents=True)
        atomic_write(folder / _REQUEST, name + "\n")
    except OSError as error:
        raise RunDirError(f"can't ask for stacks in {folder} ({reason(error)})") from None
    return name


def newest_request(run_dir: Path) -> str:
    """Return the newest request's name, "" where there was none."""
    try:
        # Opened anew each time: that is when NFS looks for changes made on other nodes.
        return (stacks_folder(run_dir) / _REQUEST).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def answer_request(run_dir: Path, name: str, rank: int, header: str) -> None:
    """Write the stacks of all threads of this process.

    Raises:
      OSError: the file can't be written.
    """
    path = stacks_folder(run_dir) / name / f"rank-{rank:05d}"
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(header + "\n")
        file.flush()
        faulthandler.dump_traceback(file)
    os.replace(partial, path)


def collect_stacks(
    run_dir: Path, name: str, ranks: set[int], wait_s: float
) -> tuple[dict[int, str], set[int]]:
    """Wait for the answers of `ranks`; return their texts by rank, and who did not answer."""
    folder = stacks_folder(run_dir) / name
    end_s = time.monotonic() + wait_s
    answers: dict[int, str] = {}
    while True:
        for rank in ranks - answers.keys():
            with contextlib.suppress(OSError):
                answers[rank] = (folder / f"rank-{rank:05d}").read_text(encoding="utf-8")
        missing = ranks - answers.keys()
        if not missing or time.monotonic() > end_s:
            return answers, missing
        time.sleep(_POLL_S)
