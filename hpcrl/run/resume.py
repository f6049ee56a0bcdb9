"""Opens a run directory: a new run, or the continuation of what it holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcrl.code_version import code_version
from hpcrl.config.load import flatten, to_dict
from hpcrl.config.root import Config
from hpcrl.durable import atomic_write, reason
from hpcrl.run.checkpoint import (
    Checkpoint,
    load_latest,
    load_path,
    remove_partial,
    set_aside_newer,
)
from hpcrl.run.in_use import check_free
from hpcrl.run.metrics import discard_metrics_after
from hpcrl.run.run_dir import CHECKPOINTS, RunDir, RunDirError

MAY_CHANGE = (
    "run.",
    "topology.",
    "stop.",
    "checkpoint.",
    "metrics.",
    "recording.",
    "evaluation.",
    "transport.",
    "inference.",
    "learner.backend",
    "learner.threads",
    "learner.compile",
    "learner.queue_unrolls",
    "learner.micro_batches",
    "learner.max_policy_lag",
    "learner.stale_unrolls",
    "learner.max_gradient_lag",
    "replay.capacity_unrolls",
    "replay.compression",
    "replay.memory_bytes",
    "env.envs_per_actor",
    "env.groups",
    "env.ranks_per_env",
    "env.isolation",
    "env.python",
    "env.step_timeout_s",
    "env.start_timeout_s",
    "env.max_restarts_per_hour",
)
"""Configuration keys, and sections ending in a dot, that a resumed run may change: they decide
where, how fast and how long it trains, not what is learned."""


@dataclass(frozen=True)
class OpenedRun:
    """A run directory ready for training.

    Attributes:
      run_dir: the directory.
      restart: 0 for the first start, one more for each start since.
      checkpoint: where training goes on; None: at the beginning.
      messages: what was found and decided, for the log.
      previous_status: STATUS.json as the start before left it; None for the first.
    """

    run_dir: RunDir
    restart: int
    checkpoint: Checkpoint | None
    messages: tuple[str, ...]
    previous_status: dict[str, Any] | None


class RunIsDone(Exception):
    """The run directory holds a run that has reached its end."""


def check_not_done(config: Config) -> None:
    """Raise RunIsDone when the run has ended under the same stop conditions.

    A finished job that is requeued, or a later one of a chain, so ends in seconds. With other
    stop conditions, or from a named checkpoint, the run goes on.
    """
    run = RunDir(config.run.dir)
    try:
        status = run.read_status() or {}
        old = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (RunDirError, OSError, yaml.YAMLError):
        return  # opening the run says what is wrong
    same_stop = isinstance(old, dict) and old.get("stop") == to_dict(config)["stop"]
    if status.get("state") == "done" and same_stop and config.run.resume == "auto":
        raise RunIsDone(
            f"{run.path} is done ({status.get('verdict', 'its goal is reached')}): nothing to do; "
            "change a stop condition to train on, or give another --run.dir"
        )


def open_run(path: str | Path, config_yaml: str, config_hash: str, resume: str) -> OpenedRun:
    """Create a run directory, or continue the run that it holds.

    Afterwards config.yaml is the new configuration (`config.restart-K.yaml` the one before),
    STATUS.json is new and says `starting`, and what lies beyond the resumed checkpoint,
    metrics and checkpoints, is set aside.
    Interrupted at any point, it can be called again.

    Args:
      path: the run directory.
      config_yaml: the resolved configuration as YAML.
      config_hash: its hash without the keys `MAY_CHANGE`.
      resume: `auto` (the newest good checkpoint if there is one), `never` (refuse a directory
        that holds a run) or the path of a checkpoint, of this run or of another one.

    Raises:
      RunDirError: the directory can't be used, another start is at work there, or the
        configuration doesn't fit the checkpoint.
      CheckpointError: the checkpoint asked for, or every one there is, is damaged.
    """
    run = RunDir(path)
    run.create()
    held = run.holds_run()
    if held and resume == "never":
        raise RunDirError(
            f"{run.path} already holds a run, and run.resume is never; give another --run.dir, "
            "or --run.resume auto to continue it"
        )
    check_free(run.path)
    previous = run.read_status()
    checkpoint = _find_checkpoint(run, resume)
    messages = list(checkpoint.skipped) if checkpoint else []
    if checkpoint:
        messages += _check_config(checkpoint.path.parents[1] / "config.yaml", config_yaml)
    restart = int((previous or {}).get("restart", 0)) + 1 if held else 0
    messages += _rewind(run, checkpoint)
    messages.append(_opening(run, restart, checkpoint))
    # Before the configuration: a run that says `done` beside new stop conditions would be refused
    # as finished by them.
    run.write_status(
        {
            "state": "starting",
            "started_unix_s": time.time(),
            "restart": restart,
            "resumed_learner_step": checkpoint.step if checkpoint else 0,
            "config_hash": config_hash,
            "hpcrl_version": code_version(),
        }
    )
    _write_config(run, config_yaml, config_hash, restart - 1)
    return OpenedRun(run, restart, checkpoint, tuple(messages), previous)


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Compare two configurations with dotted keys.

    Returns:
      (old value, new value) by key, of the changes that a resumed run may make, and of those
      it may not. A key that one side lacks counts as "absent" there.
    """
    allowed: dict[str, tuple[Any, Any]] = {}
    refused: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() | new.keys()):
        values = old.get(key, "absent"), new.get(key, "absent")
        if values[0] != values[1]:
            (allowed if key.startswith(MAY_CHANGE) else refused)[key] = values
    return allowed, refused


def _find_checkpoint(run: RunDir, resume: str) -> Checkpoint | None:
    if resume in ("auto", "never"):
        return load_latest(run.path)
    path = Path(resume).resolve()
    if not path.is_dir():
        raise RunDirError(f"run.resume: {resume} is neither auto, never nor a directory")
    if (path / CHECKPOINTS).is_dir():
        raise RunDirError(
            f"run.resume: {resume} is a run directory; give one of {path / CHECKPOINTS}/step-*"
        )
    own = path.parent == run.checkpoints.resolve()
    if not own and any(run.checkpoints.glob("step-*")):
        raise RunDirError(
            f"{run.path} holds checkpoints of its own, so it can't go on from {resume}; "
            "give another --run.dir"
        )
    return load_path(path)


def _check_config(old_path: Path, new_yaml: str) -> list[str]:
    try:
        old = flatten(yaml.safe_load(old_path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, AttributeError):
        return [f"{old_path} can't be read: the configuration was not compared with it"]
    allowed, refused = changed_keys(old, flatten(yaml.safe_load(new_yaml)))
    if refused:
        changes = "; ".join(f"{k} was {a!r}, is {b!r}" for k, (a, b) in refused.items())
        raise RunDirError(
            f"the configuration doesn't fit the checkpoints of {old_path.parent}: {changes}; "
            "a resumed run can't change that: restore it or give another --run.dir"
        )
    return [f"changed since the last start: {k}: {a!r} -> {b!r}" for k, (a, b) in allowed.items()]


def _rewind(run: RunDir, checkpoint: Checkpoint | None) -> list[str]:
    """Put aside what lies beyond the checkpoint."""
    own = checkpoint is not None and checkpoint.path.resolve().parent == run.checkpoints.resolve()
    try:
        remove_partial(run.path)
        step = checkpoint.step if checkpoint else -1
        aside = set_aside_newer(run.path, step)
    except OSError as error:
        raise RunDirError(f"can't rename in {run.checkpoints}: {reason(error)}") from None
    messages = [f"checkpoint {name} put aside as aside-{name}" for name in aside]
    dropped = discard_metrics_after(run.path, step if own else -1)
    if dropped:
        messages.append(
            f"{dropped} records of metrics beyond learner step {max(step, 0)} moved to "
            "metrics.discarded.jsonl"
        )
    return messages


def _opening(run: RunDir, restart: int, checkpoint: Checkpoint | None) -> str:
    if checkpoint:
        return f"restart {restart}: continues at learner step {checkpoint.step}, {checkpoint.path}"
    if restart:
        return f"restart {restart}: no checkpoint in {run.path} yet, starts at the beginning"
    return f"new run in {run.path}"


def _write_config(run: RunDir, config_yaml: str, config_hash: str, previous_restart: int) -> None:
    text = f"# hpcrl {code_version()}, hash {config_hash}\n{config_yaml}"
    try:
        old = run.config.read_text(encoding="utf-8") if run.config.exists() else text
        if old != text:
            name = f"config.restart-{max(previous_restart, 0)}.yaml"
            atomic_write(run.path / name, old)
        atomic_write(run.config, text)
    except OSError as error:
        raise RunDirError(f"can't write {run.config}: {reason(error)}") from None
