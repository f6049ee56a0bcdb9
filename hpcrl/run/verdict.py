"""What a batch script does after a launch has ended: start again, be requeued, or stop.

The exit code alone can't say: srun reports the greatest one of all ranks, so a crash with 1 hides
behind the 75 of the others. STATUS.json and the checkpoints that are there decide with it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcrl import exit_codes
from hpcrl.durable import reason
from hpcrl.run.checkpoint import list_checkpoints
from hpcrl.run.in_use import ranks_at_work
from hpcrl.run.run_dir import RunDir, RunDirError

Action = Literal["done", "again", "requeue", "stop"]

ATTEMPTS = "attempts.jsonl"

_KILLED = 137
_LINGER_S = 60.0
"""How long ranks may be at work after their launcher's end; srun waits as long for the last one."""


@dataclass(frozen=True)
class Attempt:
    """How one launch of a run ended.

    Attributes:
      job: Slurm's job, the same over its requeues.
      exit_code: of the launcher.
      checkpoint_step: learner step of the newest checkpoint; -1: there is none.
      requeues: how often the job had been requeued when it was launched.
    """

    job: str
    exit_code: int
    checkpoint_step: int
    requeues: int = 0


class Verdict(NamedTuple):
    """What to do now.

    Attributes:
      action: done; again: launch in the same allocation; requeue; stop.
      exit_code: with which the batch script ends when it doesn't launch again.
      reason: in words.
    """

    action: Action
    exit_code: int
    reason: str


def judge(
    status: Mapping[str, Any],
    attempts: Sequence[Attempt],
    max_restarts: int = 100,
    max_fruitless: int = 2,
) -> Verdict:
    """Return what to do after the last of `attempts`, which are those of one job.

    A failure is tried again in the same allocation if the launch had written a newer
    checkpoint; after a fruitless one the nodes are under suspicion, so the job is requeued.

    Args:
      status: STATUS.json as the last launch left it.
      attempts: at least one, oldest first.
      max_restarts: launches that may follow the first one.
      max_fruitless: launches in a row that end without a newer checkpoint before it stops.
    """
    last = attempts[-1]
    code, state = last.exit_code, status.get("state")
    if code == exit_codes.DONE and state == "done":
        return Verdict("done", code, str(status.get("verdict", "done")))
    if code in (exit_codes.USAGE, exit_codes.LAUNCH):
        return Verdict("stop", code, f"exit code {code}: it would fail again in the same way")
    if code == exit_codes.STORAGE:
        return Verdict("stop", code, f"exit code {code}: the run directory can't be written")
    if code == exit_codes.ENVIRONMENTS:
        return Verdict(
            "stop", code, f"exit code {code}: environments failed too often, see the job's output"
        )
    fruitless = _fruitless(attempts)
    # 75 would make sites that requeue by exit code go on with what is stopped here.
    stop_code = code if code not in (exit_codes.DONE, exit_codes.REQUEUE) else exit_codes.INTERNAL
    if fruitless >= max_fruitless:
        return Verdict(
            "stop",
            stop_code,
            f"{fruitless} launches in a row ended without a newer checkpoint (the last with exit "
            f"code {code}): stopped, as another would hardly fare better; see logs/",
        )
    if len(attempts) > max_restarts:
        return Verdict("stop", stop_code, f"{max_restarts} restarts used up")
    if code == exit_codes.REQUEUE and state == "requeue":
        return Verdict("requeue", code, str(status.get("verdict", "stopped to be requeued")))
    failed = f"exit code {code}, state {state or 'unknown'}, checkpoint {last.checkpoint_step}"
    if fruitless:
        return Verdict("requeue", stop_code, f"{failed}: no newer checkpoint; on other nodes")
    return Verdict("again", stop_code, f"{failed}: launches again from it")


def _fruitless(attempts: Sequence[Attempt]) -> int:
    """Count the launches at the end of `attempts` that did not bring the run further."""
    count, newest = 0, -1
    for attempt in attempts:
        count = 0 if attempt.checkpoint_step > newest else count + 1
        newest = max(newest, attempt.checkpoint_step)
    return count


def judge_run(
    path: Path,
    exit_code: int,
    job: str,
    max_restarts: int,
    max_fruitless: int,
    requeues: int = 0,
) -> Verdict:
    """Note the end of a launch in RUN/attempts.jsonl and return what to do now.

    Only launches of the same job count: who submits again by hand has looked at the run.

    Args:
      path: the run directory.
      exit_code: of the launcher.
      job: Slurm's job.
      max_restarts: as `judge`.
      max_fruitless: as `judge`.
      requeues: how often the job has been requeued so far.

    Raises:
      RunDirError: the run's files can't be read or written.
    """
    # The ranks of this launch may live a little longer than their launcher. Others are at work
    # where this launch never got as far as to see them: it has no say about their run.
    end_s = time.monotonic() + _LINGER_S
    while exit_code not in (exit_codes.DONE, exit_codes.REQUEUE) and ranks_at_work(path):
        if exit_code == exit_codes.USAGE or time.monotonic() > end_s:
            why = f"another start is at work in {path}; this launch ended with {exit_code}"
            return Verdict("stop", exit_code, why)
    RunDir(path).settle_failure(f"the launch ended with exit code {exit_code}")
    return _judge_next(path, exit_code, job, max_restarts, max_fruitless, requeues)


def judge_lost(
    path: Path, job: str, max_restarts: int, max_fruitless: int, requeues: int
) -> Verdict:
    """Before the first launch after a requeue: count the start before if nobody did.

    It has left no record where Slurm itself requeued the job, as a node failed or another job took
    its place. The arguments are those of `judge_run`; it raises what that raises.
    """
    if any(a.job == job and a.requeues == requeues - 1 for a in read_attempts(path)):
        return Verdict("again", exit_codes.DONE, "the start before was counted at its end")
    return _judge_next(path, _KILLED, job, max_restarts, max_fruitless, requeues - 1)


def _judge_next(
    path: Path, exit_code: int, job: str, max_restarts: int, max_fruitless: int, requeues: int
) -> Verdict:
    """Judge with this launch added to those that are known."""
    status = RunDir(path).read_status() or {}
    checkpoints = list_checkpoints(path)
    attempt = Attempt(job, exit_code, checkpoints[0][0] if checkpoints else -1, requeues)
    known = read_attempts(path)
    start = max((a.checkpoint_step for a in known if a.job != job), default=-1)
    # What earlier jobs had reached is no progress of this one.
    attempts = [Attempt(job, 0, start)] if start >= 0 else []
    attempts += [*(a for a in known if a.job == job), attempt]
    verdict = judge(status, attempts, max_restarts + (start >= 0), max_fruitless)
    _append(path / ATTEMPTS, attempt, verdict)
    return verdict


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Return the launches of a run that have been judged, oldest first.

    Raises:
      RunDirError: they can't be read.
    """
    path = run_dir / ATTEMPTS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirError(f"can't read {path}: {reason(error)}") from None
    names = Attempt.__dataclass_fields__
    attempts = []
    for line in lines:
        try:
            record = json.loads(line)
            attempts.append(Attempt(**{name: record[name] for name in names if name in record}))
        except (ValueError, TypeError):
            continue  # cut short when the disk was full
    return attempts


def _append(path: Path, attempt: Attempt, verdict: Verdict) -> None:
    record = {"time_unix_s": time.time(), **asdict(attempt), **verdict._asdict()}
    # The verdict's exit code is for the script; the launch's own is kept.
    record["exit_code"] = attempt.exit_code
    try:
        with path.open("ab+") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
            # A line that was cut short must not take this one with it.
            cut = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * cut + json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise RunDirError(
            f"can't write {path} ({reason(error)}): restarts could not be counted, so the job ends"
        ) from None
