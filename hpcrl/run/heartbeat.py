"""Every rank's sign of life, as the nodes' files tell it.

    RUN/logs/beats/node-00000    one line of JSON per rank of that node; who is dead, by its word

What is written is what the rank's LOOP did, not that a thread of it lives: `beat_unix_s` is when
the loop was last seen going round. Readers need no MPI and can be on any node; `node_table` writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.human import format_duration

LEFT = "left"
"""The stage of a rank that has ended normally."""
DIED = "died"
"""The stage, to readers, of a rank that another one knows to be dead while the run goes on."""


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
      work_s: mean time that its own work took lately, once; 0: unknown.
      work_share: share of the time that it spent on that.
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
    work_s: float = 0.0
    work_share: float = 0.0


def beats_folder(run_dir: Path) -> Path:
    """Return where the nodes' files are."""
    return run_dir / "logs" / "beats"


def read_beats(run_dir: Path, restart: int | None = None) -> list[Beat]:
    """Return the newest beat of every rank of one start (None: of the newest), by rank."""
    beats: list[Beat] = []
    dead: set[tuple[int, int]] = set()
    try:
        paths = sorted(beats_folder(run_dir).glob("node-*"))
    except OSError:
        return []
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            beat, lost = _parse(line)
            beats += beat
            dead |= lost
    newest = max((beat.restart for beat in beats), default=0) if restart is None else restart
    return sorted(
        beat._replace(stage=DIED) if (newest, beat.rank) in dead else beat
        for beat in beats
        if beat.restart == newest
    )


def _parse(line: bytes) -> tuple[list[Beat], set[tuple[int, int]]]:
    """Return a line's beat, if it is one, and the (restart, rank) that it says are dead.

    A record that was changed while it was copied is neither; the next one will be whole.
    """
    try:
        fields = json.loads(line)
        if "lost" in fields:
            return [], {(fields["restart"], rank) for rank in fields["lost"]}
        return [Beat(**fields)], set()
    except (ValueError, TypeError, KeyError):
        return [], set()


def lost_ranks(beats: Iterable[Beat]) -> set[int]:
    """Return the ranks that others know to be dead."""
    return {beat.rank for beat in beats if beat.stage == DIED}


def silent(beats: Sequence[Beat], now_unix_s: float) -> list[Beat]:
    """Return those whose loop stands still, the longest silent first.

    A few ticks pass between a beat and its record, more where another rank of the node must take
    over the writing, and the clocks of nodes differ a little.
    """
    quiet = [
        beat
        for beat in beats
        if beat.stage not in (LEFT, DIED) and now_unix_s - beat.beat_unix_s > 4 * beat.tick_s + 2.0
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
