"""The run directory: the only state that ranks, restarts and people share."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.durable import atomic_write, json_text, reason, write_synced

STATUS_SCHEMA_VERSION = 1
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
STATUS = "STATUS.json"
TENSORBOARD = "tensorboard"

UNDER_WAY = ("starting", "running", "stopping")
"""States of a run that some process should be working on."""

_FAILURES = "failures.jsonl"
_TEST_BYTES = 2**16


class RunDirError(RuntimeError):
    """A run directory can't be used; the message names the path and the consequence."""


class RunDir:
    """Paths and self-describing files of one run. Building one touches no file.

    Hazard: one process (learner rank 0) writes; any number may read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.status = self.path / STATUS
        self.topology = self.path / "topology.json"
        self.metrics = self.path / METRICS
        self.checkpoints = self.path / CHECKPOINTS
        self.logs = self.path / "logs"
        self.tensorboard = self.path / TENSORBOARD
        self.trajectories = self.path / "trajectories"

    def create(self) -> None:
        """Create the directory and its folders, and prove by a small file that they take data.

        Raises:
          RunDirError: they can't be created or written.
        """
        probe = self.path / ".write-test"
        try:
            for folder in (self.checkpoints, self.logs, self.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            try:
                write_synced(probe, bytes(_TEST_BYTES))
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise RunDirError(
                f"can't write to run directory {self.path.absolute()} ({reason(error)}): no "
                "checkpoint or metric could be kept there, so nothing was started; free space, "
                "correct its permissions or give another --run.dir"
            ) from None

    def recorded_bytes(self) -> int:
        """Return the size of all that recorders have left, whole or not."""
        return sum(path.stat().st_size for path in self.trajectories.glob("*/*"))

    def holds_run(self) -> bool:
        """Whether a run was ever started here."""
        return self.config.exists() or self.status.exists() or any(self.checkpoints.glob("step-*"))

    def write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        """Replace one JSON file of the run.

        Raises:
          RunDirError: it can't be written; the old one is untouched.
        """
        try:
            atomic_write(path, json_text(dict(data), indent=2) + "\n")
        except OSError as error:
            raise RunDirError(
                f"can't write {path} ({reason(error)}); what it said before is still there"
            ) from None

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace STATUS.json, adding its schema version, the time and who wrote it.

        Raises:
          RunDirError: it can't be written; the old one is untouched.
        """
        stamp = {
            "schema_version": STATUS_SCHEMA_VERSION,
            "updated_unix_s": time.time(),
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        self.write_json(self.status, {**status, **stamp})

    def update_status(self, **changes: Any) -> None:
        """Replace some entries of STATUS.json and keep the others.

        Raises:
          RunDirError: it can't be read or written.
        """
        self.write_status({**(self.read_status() or {}), **changes})

    def note_failure(self, why: str) -> None:
        """Keep why the run fails, and say so in STATUS.json, where that can be written.

        Called by whichever process sees the failure, while the usual writer may be dead or stuck.
        """
        with contextlib.suppress(OSError):
            record = {"time_unix_s": time.time(), "why": why}
            with (self.logs / _FAILURES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self._fail(why)

    def settle_failure(self, default: str) -> None:
        """Once no rank is left: a run that says it is under way has failed, by the first cause."""
        status_s = (self.read_status() or {}).get("started_unix_s", 0.0)
        causes = []
        with contextlib.suppress(OSError, ValueError, KeyError):
            for line in (self.logs / _FAILURES).read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                if record["time_unix_s"] >= status_s:
                    causes.append(record["why"])
        self._fail(causes[0] if causes else default)

    def _fail(self, why: str) -> None:
        # A name of its own: the usual writer may be at work on its temporary file.
        partial = self.path / f".{STATUS}.failure-{os.uname().nodename}-{os.getpid()}"
        with contextlib.suppress(OSError, RunDirError):
            status = self.read_status()
            if status is None or status.get("state") not in UNDER_WAY:
                return
            status |= {"state": "failed", "verdict": why, "updated_unix_s": time.time()}
            try:
                write_synced(partial, json_text(status, indent=2) + "\n")
                os.replace(partial, self.status)
            finally:
                partial.unlink(missing_ok=True)

    def read_status(self) -> dict[str, Any] | None:
        """Return the contents of STATUS.json, None where there is none.

        Raises:
          RunDirError: it can't be read or isn't a JSON object.
        """
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunDirError(f"can't read {self.status}: {reason(error)}") from None
        if not isinstance(status, dict):
            raise RunDirError(f"{self.status} holds no JSON object")
        return status
