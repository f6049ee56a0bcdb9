"""`hpcrl status`: how a run stands, during and after it, from its directory alone."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcrl import exit_codes
from hpcrl.human import format_count, format_duration, format_share
from hpcrl.run.heartbeat import LEFT, describe, lost_ranks, read_beats, silent
from hpcrl.run.metrics import read_last_metrics
from hpcrl.run.report import key_value_table, summarise, summary_table
from hpcrl.run.run_dir import UNDER_WAY, RunDir, RunDirError
from hpcrl.run.slowness import slow_ranks
from hpcrl.run.stacks import collect_stacks, request_stacks

SILENT_AFTER_S = 60.0
"""A run that is under way and wrote nothing for this long is reported as silent."""


def silence_s(run_dir: Path, now_unix_s: float) -> float | None:
    """Return seconds since learner rank 0 last wrote STATUS.json or metrics; None: never.

    Raises:
      RunDirError: STATUS.json can't be read.
    """
    status = RunDir(run_dir).read_status() or {}
    record = read_last_metrics(run_dir) or {}
    times = [status.get("updated_unix_s"), record.get("time_unix_s")]
    known = [float(t) for t in times if t is not None]
    return max(0.0, now_unix_s - max(known)) if known else None


def status_table(run_dir: Path, now_unix_s: float | None = None) -> RenderableType:
    """Return the summary so far, the newest rates, and a warning when a live run is silent.

    Raises:
      RunDirError: it is not a run directory, or its files can't be read.
    """
    now_unix_s = time.time() if now_unix_s is None else now_unix_s
    summary = summarise(run_dir)
    quiet_s = silence_s(run_dir, now_unix_s)
    parts: list[RenderableType] = [summary_table(summary), _newest(run_dir, now_unix_s)]
    if summary["state"] in UNDER_WAY and quiet_s is not None and quiet_s > SILENT_AFTER_S:
        parts.append(
            Text(
                f"The run says it is {summary['state']}, but wrote nothing for "
                f"{format_duration(quiet_s)}: it was killed, or it hangs.",
                style="bold red",
            )
        )
    if summary["state"] in UNDER_WAY:
        parts += _rank_lines(run_dir, now_unix_s)
    return Group(*parts)


def _rank_lines(run_dir: Path, now_unix_s: float) -> list[Text]:
    """Who is silent since when, and who is dead while the others go on."""
    beats = read_beats(run_dir, (RunDir(run_dir).read_status() or {}).get("restart"))
    lines = [Text(describe(beat, now_unix_s), "bold red") for beat in silent(beats, now_unix_s)]
    lines += [Text(slow.describe(), "yellow") for slow in slow_ranks(beats)]
    names = {beat.rank: beat.name for beat in beats}
    lost = ", ".join(f"{names.get(rank, '')} (rank {rank})" for rank in sorted(lost_ranks(beats)))
    if lost:
        lines.append(Text(f"died, the run goes on without their environments: {lost}", "yellow"))
    return lines


def _newest(run_dir: Path, now_unix_s: float) -> Table:
    record = read_last_metrics(run_dir)
    if record is None:
        return key_value_table("newest metrics", {"written": "none yet"})
    rows = {
        "written": f"{format_duration(now_unix_s - record['time_unix_s'])} ago",
        "frames/s": format_count(record.get("frames_per_s")),
        "learner steps/s": format_count(record.get("learner_steps_per_s")),
        "policy lag": format_count(record.get("policy_lag")),
        "batch fill": format_share(record.get("batch_fill")),
        "queue fill": format_share(record.get("queue_fill")),
    }
    return key_value_table("newest metrics", rows)


def show_stacks(run_dir: Path, wait_s: float) -> int:
    """Ask all ranks for their stacks and print them; return the exit code.

    Raises:
      RunDirError: nothing runs there, or the request can't be written.
    """
    status = RunDir(run_dir).read_status()
    if status is None or status.get("state") not in UNDER_WAY:
        state = status.get("state") if status else "no run"
        raise RunDirError(f"{run_dir}: nothing runs there (STATUS.json: {state})")
    beats = read_beats(run_dir, status.get("restart"))
    gone = lost_ranks(beats) | {beat.rank for beat in beats if beat.stage == LEFT}
    alive = {beat.rank: beat for beat in beats if beat.rank not in gone}
    if not alive:
        raise RunDirError(f"{run_dir}: no rank has given a sign of life yet")
    longest_tick_s = max(beat.tick_s for beat in alive.values())
    name = request_stacks(run_dir)
    answers, missing = collect_stacks(run_dir, name, set(alive), max(wait_s, 3 * longest_tick_s))
    for rank in sorted(answers):
        print(answers[rank], flush=True)
    for rank in sorted(missing):
        print(f"no answer: {describe(alive[rank], time.time())}", flush=True)
    return exit_codes.INTERNAL if missing else exit_codes.DONE
