"""Whether the ranks of another start are at work in a run directory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hpcrl.run.heartbeat import DIED, LEFT, Beat, beats_folder, read_beats
from hpcrl.run.run_dir import UNDER_WAY, RunDir, RunDirError

_LOOK_S = 0.1


def ranks_at_work(run_dir: Path) -> list[Beat]:
    """Return ranks whose sign of life changes while one looks on; [] where nobody works.

    Only a run that says it is under way and whose ranks have written lately is looked at for
    longer than a moment: for as long as they would take to write again.

    Raises:
      RunDirError: STATUS.json can't be read.
    """
    if (RunDir(run_dir).read_status() or {}).get("state") not in UNDER_WAY:
        return []
    before = _alive(run_dir)
    if not before:
        return []
    wait_s = 2 * max(beat.tick_s for beat in before.values()) + 1.0
    end_s = time.monotonic() + wait_s - max(0.0, _age_s(run_dir))
    while time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        moved = [beat for rank, beat in _alive(run_dir).items() if beat != before.get(rank)]
        if moved:
            return moved
    return []


def check_free(run_dir: Path) -> None:
    """Refuse a run directory in which others are at work.

    Raises:
      RunDirError: they are; or STATUS.json can't be read.
    """
    for beat in ranks_at_work(run_dir):
        raise RunDirError(
            f"{run_dir} is in use: {beat.name} (rank {beat.rank}, {beat.host}, pid {beat.pid}) of "
            f"start {beat.restart} is at work there, and two starts would overwrite each other's "
            "checkpoints; wait for its end or give another --run.dir"
        )


def _alive(run_dir: Path) -> dict[int, Beat]:
    """Beats by rank, without those that have ended as far as this host can know."""
    here = os.uname().nodename
    return {
        beat.rank: beat
        for beat in read_beats(run_dir)
        if beat.stage not in (LEFT, DIED)
        and not (beat.host == here and not Path(f"/proc/{beat.pid}").exists())
    }


def _age_s(run_dir: Path) -> float:
    """Seconds since the newest beat was written."""
    written_s = []
    with contextlib.suppress(OSError):
        for path in beats_folder(run_dir).glob("node-*"):
            with contextlib.suppress(OSError):  # replaced just now
                written_s.append(path.stat().st_mtime)
    return time.time() - max(written_s, default=time.time())
