"""What a batch script does after a launch has ended: start again, be requeued, or stop.

The exit code alone can't say: srun reports the greatest one of all ranks, so a crash with 1 hides
behind the 75 of the others. STATUS.json and the checkpoints that are there decide with it.
"""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Attempt:
    """How one launch of a run ended.

    Attributes:
      job: Slurm's job, the same over its requeues.
      exit_code: of the launcher.
      checkpoint_step: learner step of the newest checkpoint; -1: there is none.
    """

    job: str
    exit_code: int
    checkpoint_step: int


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
    path: Path, exit_code: int, job: str, max_restarts: int, max_fruitless: int
) -> Verdict:
    """Note the end of a launch in RUN/attempts.jsonl and return what to do now.

    Only launches of the same job count: who submits again by hand has looked at the run.

    Raises:
      RunDirError: the run's files can't be read or written.
    """
    # A launch that was refused because another one works here has no say about that one.
    if exit_code != exit_codes.USAGE or not ranks_at_work(path):
        RunDir(path).settle_failure(f"the launch ended with exit code {exit_code}")
    status = RunDir(path).read_status() or {}
    checkpoints = list_checkpoints(path)
    attempt = Attempt(job, exit_code, checkpoints[0][0] if checkpoints else -1)
    known = _read(path / ATTEMPTS)
    start = max((a.checkpoint_step for a in known if a.job != job), default=-1)
    # What earlier jobs had reached is no progress of this one.
    attempts = [Attempt(job, 0, start)] if start >= 0 else []
    attempts += [*(a for a in known if a.job == job), attempt]
    verdict = judge(status, attempts, max_restarts + (start >= 0), max_fruitless)
    _append(path / ATTEMPTS, attempt, verdict)
    return verdict


def _read(path: Path) -> list[Attempt]:
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
            attempts.append(Attempt(**{name: record[name] for name in names}))
        except (ValueError, KeyError, TypeError):
            continue  # cut short when the disk was full
    return attempts


def _append(path: Path, attempt: Attempt, verdict: Verdict) -> None:
    record = {"time_unix_s": time.time(), **asdict(attempt), **verdict._asdict()}
    # The verdict's exit code is for the script; the launch's own is kept.
    record["exit_code"] = attempt.exit_code
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise RunDirError(
            f"can't write {path} ({reason(error)}): restarts could not be counted, so the job ends"
        ) from None
