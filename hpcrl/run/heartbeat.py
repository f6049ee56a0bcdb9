"""Every rank's sign of life: a record of fixed size in one small file per node.

    RUN/logs/beats/node-00000    one line of JSON per rank of that node, overwritten in place

What is written is what the rank's LOOP did, not that a thread of it lives: `beat_unix_s` is when
the loop was last seen going round. Readers need no MPI and can be on any node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.human import format_duration

RECORD_BYTES = 512
LEFT = "left"
"""The stage of a rank that has ended normally."""

_NUM_NAME = 64
_NUM_LOST = 24


class Beat(NamedTuple):
    """One rank's sign of life.

    Attributes:
      rank: of MPI.COMM_WORLD.
      name: role and index.
      host, pid: where it runs.
      restart: of the run; records of earlier starts are no news.
      tick_s: how often it is written.
      stage: the stage that the loop finished last.
      beats: rounds of the loop; only whether it changes matters.
      beat_unix_s: when it was last seen to change.
      lost: ranks that this one knows to be dead, while the run goes on without them.
    """

    rank: int
    name: str
    host: str
    pid: int
    restart: int
    tick_s: float
    stage: str = "start"
    beats: int = 0
    beat_unix_s: float = 0.0
    lost: tuple[int, ...] = ()


class BeatFile:
    """One rank's record in its node's file.

    Raises:
      OSError: the folder can't be made or, in `write`, the record not be written.
    """

    def __init__(self, run_dir: Path, node: int, slot: int):
        folder = beats_folder(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"node-{node:05d}"
        self._offset = slot * RECORD_BYTES

    def write(self, beat: Beat) -> None:
        """Overwrite the record."""
        fields = beat._replace(host=beat.host[:_NUM_NAME], lost=beat.lost[:_NUM_LOST])._asdict()
        line = json.dumps(fields).encode().ljust(RECORD_BYTES - 1) + b"\n"
        # Closed each time: that is when NFS shows it to other nodes, without a sync of a disk.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(descriptor, line, self._offset)
        finally:
            os.close(descriptor)


def beats_folder(run_dir: Path) -> Path:
    """Return where the nodes' files are."""
    return run_dir / "logs" / "beats"


def read_beats(run_dir: Path, restart: int | None = None) -> list[Beat]:
    """Return the newest beat of every rank of one start (None: of the newest), by rank."""
    beats: list[Beat] = []
    for path in sorted(beats_folder(run_dir).glob("node-*")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        for start in range(0, len(data), RECORD_BYTES):
            beat = _parse(data[start : start + RECORD_BYTES])
            if beat is not None:
                beats.append(beat)
    newest = max((beat.restart for beat in beats), default=0) if restart is None else restart
    return sorted(beat for beat in beats if beat.restart == newest)


def _parse(record: bytes) -> Beat | None:
    """Return the beat, None where a record was never written or is being written."""
    try:
        fields = json.loads(record.strip(b"\0 \n"))
        return Beat(**{**fields, "lost": tuple(fields["lost"])})
    except (ValueError, TypeError, KeyError):
        return None


def lost_ranks(beats: Iterable[Beat]) -> set[int]:
    """Return the ranks that others know to be dead."""
    return {rank for beat in beats for rank in beat.lost}


def silent(beats: Sequence[Beat], now_unix_s: float) -> list[Beat]:
    """Return those whose loop stands still, the longest silent first.

    A few ticks pass between a beat and its record, and the clocks of nodes differ a little.
    """
    lost = lost_ranks(beats)
    quiet = [
        beat
        for beat in beats
        if beat.stage != LEFT
        and beat.rank not in lost
        and now_unix_s - beat.beat_unix_s > 4 * beat.tick_s + 2.0
    ]
    return sorted(quiet, key=lambda beat: beat.beat_unix_s)


def describe(beat: Beat, now_unix_s: float) -> str:
    """Say who is silent since when, and where in its loop."""
    state = _process_state(beat)
    return (
        f"{beat.name} (rank {beat.rank}, {beat.host}, pid {beat.pid}{state}) silent for "
        f"{format_duration(now_unix_s - beat.beat_unix_s)}, since it finished stage {beat.stage}"
    )


def _process_state(beat: Beat) -> str:
    """What the operating system says of a process of this host, "" of another."""
    if beat.host != os.uname().nodename:
        return ""
    try:
        text = Path(f"/proc/{beat.pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ", gone"
    state = next((line for line in text.splitlines() if line.startswith("State:")), "")
    return ", stopped" if "T (" in state else ""
