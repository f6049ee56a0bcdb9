"""Durable checkpoints: temporary directory, fsync, manifest last, rename.

    checkpoints/step-000000001200/   tensors.safetensors state.json [extra files] manifest.json
    checkpoints/latest               name of the newest one, for people and scripts
    checkpoints/aside-step-*/        damaged, or left behind by a resume from an older one

A directory named `step-*` was complete when it got that name. The manifest holds sizes and
SHA-256 sums of all files, so damage done later is found when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hpcrl.durable import (
    atomic_write,
    json_text,
    reason,
    sync_directory,
    sync_file,
    write_synced,
)
from hpcrl.run.run_dir import CHECKPOINTS

SCHEMA_VERSION = 1

_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_MANIFEST = "manifest.json"
_RESERVED = (_TENSORS, _STATE, _MANIFEST)
_NAME = re.compile(r"step-(\d{12,})")
_FILE_NAME = re.compile(r"\w[\w.-]*")
_READ_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read; the message says which and what remains."""


@dataclass(frozen=True)
class Snapshot:
    """What to save. Its arrays must not change until it is written: the caller copied them.

    Attributes:
      step: learner steps done.
      tensors: arrays by name, numpy or CPU torch tensors; any dtype that numpy has.
      state: JSON-able; NaN and infinities are kept.
      extra_files: writers of further files by name; each is given the path to write.
    """

    step: int
    tensors: Mapping[str, Any]
    state: Mapping[str, Any]
    extra_files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """What was read.

    Attributes:
      step: learner steps done.
      tensors: writable arrays by name.
      state: as it was saved.
      path: its directory, where extra files are.
      skipped: why newer checkpoints of the run were passed over, one message each.
    """

    step: int
    tensors: dict[str, npt.NDArray[Any]]
    state: dict[str, Any]
    path: Path
    skipped: tuple[str, ...] = ()


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (learner step, directory) of a run's checkpoints, newest first, unverified."""
    folder = run_dir / CHECKPOINTS
    names = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*")]
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def save_checkpoint(
    run_dir: Path, snapshot: Snapshot, keep: int, advance: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint durably, then remove all but the newest `keep`.

    A good checkpoint of the same step is left as it is: it holds the same learner state.

    Args:
      run_dir: the run directory.
      snapshot: what to save.
      keep: how many checkpoints remain.
      advance: called whenever a part of the work on the disk is done.

    Returns:
      Its directory.

    Raises:
      CheckpointError: it can't be written; the earlier checkpoints are untouched.
      ValueError: `keep` or the name of an extra file is out of bounds.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}: the newest is never removed")
    for name in snapshot.extra_files:
        if name in _RESERVED or not _FILE_NAME.fullmatch(name):
            raise ValueError(f"extra file {name!r} is a reserved name or a path")
    folder = run_dir / CHECKPOINTS
    final = folder / f"step-{snapshot.step:012d}"
    partial = folder / f"tmp-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(run_dir)
        if not _is_good(final, advance):
            if final.exists():
                _set_aside(final)
            partial.mkdir()
            _write(partial, snapshot, advance)
            os.rename(partial, final)
            sync_directory(folder)
        atomic_write(folder / "latest", final.name + "\n")
        _prune(run_dir, snapshot.step, keep)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_not_written(run_dir, snapshot.step, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def load_latest(run_dir: Path) -> Checkpoint | None:
    """Read the newest good checkpoint, which is verified; None when the run has none at all.

    Raises:
      CheckpointError: there are checkpoints and none of them is good.
    """
    skipped: list[str] = []
    for _, path in list_checkpoints(run_dir):
        try:
            return dataclasses.replace(load_path(path), skipped=tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {run_dir / CHECKPOINTS} is good: {'; '.join(skipped)}; "
            "to train from the start give another --run.dir"
        )
    return None


def load_path(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in one directory.

    Raises:
      CheckpointError: it isn't one, or it is damaged.
    """
    _verify(path)
    try:
        saved = json.loads((path / _STATE).read_text(encoding="utf-8"))
        tensors = load_file(path / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} can't be read: {reason(error)}") from None
    return Checkpoint(saved["step"], tensors, saved["state"], path)


def set_aside_newer(run_dir: Path, step: int) -> list[str]:
    """Rename checkpoints newer than `step` to `aside-step-*`, and point `latest` at the rest.

    Call it when training goes on from `step`: what is newer is damaged or another future.

    Returns:
      Names of the renamed ones.
    """
    newer = [path for newer_step, path in list_checkpoints(run_dir) if newer_step > step]
    for path in newer:
        _set_aside(path)
    remaining = list_checkpoints(run_dir)
    if newer and remaining:
        atomic_write(run_dir / CHECKPOINTS / "latest", remaining[0][1].name + "\n")
    return [path.name for path in newer]


def remove_partial(run_dir: Path) -> None:
    """Remove what killed writers left behind."""
    for path in (run_dir / CHECKPOINTS).glob("tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def partial_bytes(run_dir: Path) -> int:
    """Return how many bytes of a checkpoint that is being written have reached its files."""
    total = 0
    # What is listed may be gone before it is looked at, a folder as well as a file.
    with contextlib.suppress(OSError):
        for path in (run_dir / CHECKPOINTS).glob("tmp-step-*/*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


def _write(partial: Path, snapshot: Snapshot, advance: Callable[[], None]) -> None:
    saved = {"step": snapshot.step, "state": dict(snapshot.state)}
    write_synced(partial / _STATE, json.dumps(saved))
    # safetensors copies the memory of an array as if it were C-contiguous, without a check.
    tensors = {name: np.asarray(value, order="C") for name, value in snapshot.tensors.items()}
    save_file(tensors, partial / _TENSORS)
    # It also makes files that only their owner can read.
    shutil.copymode(partial / _STATE, partial / _TENSORS)
    for name, write in snapshot.extra_files.items():
        write(partial / name)
        advance()
    names = [_STATE, _TENSORS, *snapshot.extra_files]
    for name in names[1:]:
        sync_file(partial / name, advance)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "created_unix_s": time.time(),
        "files": {name: _describe(partial / name, advance) for name in names},
    }
    write_synced(partial / _MANIFEST, json_text(manifest, indent=2) + "\n")
    sync_directory(partial)


def _describe(path: Path, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
            advance()
    return {"bytes": size, "sha256": digest.hexdigest()}


def _verify(path: Path, advance: Callable[[], None] = lambda: None) -> None:
    """Compare every file with the manifest."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has schema version {version}; this hpcrl reads {SCHEMA_VERSION}"
            )
        for name, expected in manifest["files"].items():
            found = _describe(path / name, advance)
            if found["bytes"] != expected["bytes"]:
                sizes = f"{found['bytes']} bytes instead of {expected['bytes']}"
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has {sizes}")
            if found != expected:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has another SHA-256")
    except OSError as error:
        missing = Path(error.filename or _MANIFEST).name
        raise CheckpointError(f"checkpoint {path}: can't read {missing}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} is no manifest") from None


def _is_good(path: Path, advance: Callable[[], None]) -> bool:
    try:
        _verify(path, advance)
    except CheckpointError:
        return False
    return True


def _set_aside(path: Path) -> None:
    target, count = path.with_name(f"aside-{path.name}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"aside-{path.name}-{count}")
    os.rename(path, target)


def _prune(run_dir: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` up to `step`; later ones are not this run's to count."""
    old = [path for old_step, path in list_checkpoints(run_dir) if old_step <= step][keep:]
    for path in old:
        # First the name, so that a kill between two files leaves no `step-*` with holes.
        doomed = path.with_name(f"tmp-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _not_written(run_dir: Path, step: int, error: Exception) -> str:
    kept = [old_step for old_step, _ in list_checkpoints(run_dir)]
    remains = f"the newest one kept is of learner step {kept[0]}" if kept else "there is none yet"
    return (
        f"checkpoint of learner step {step} can't be written to {run_dir / CHECKPOINTS} "
        f"({reason(error)}); {remains}"
    )
