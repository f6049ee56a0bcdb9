"""Writes checkpoints beside training: the learner pays for the copy, not for the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.run.checkpoint import CheckpointError, Snapshot, partial_bytes, save_checkpoint

_LOOK_S = 0.5


class CheckpointWriter:
    """One background write at a time.

    Attributes:
      saved_step: learner step of the last durable checkpoint of this writer; None before.
      write_s: seconds that the last write took, successful or not.
    """

    def __init__(self, run_dir: Path, keep: int):
        self.saved_step: int | None = None
        self.write_s = 0.0
        self._run_dir = run_dir
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._parts = 0

    @property
    def busy(self) -> bool:
        """Whether a write is under way; `submit` would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot, after the write under way if there is one.

        Raises:
          CheckpointError: the write before failed. This snapshot is not taken; the writer can
            be used again.
        """
        self.wait()
        # A daemon: what a dying process cuts off is a temporary directory, never a checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def take_error(self) -> CheckpointError | None:
        """Return why the last write failed, once, if it has ended and did."""
        if self.busy:
            return None
        try:
            self.wait()
        except CheckpointError as error:
            return error
        return None

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Return when nothing is being written.

        Args:
          beat: called about twice a second while the write gets on; not while the disk hangs.

        Raises:
          CheckpointError: the write failed; reported once.
        """
        if self._thread is not None:
            seen = None
            while self._thread.is_alive():
                self._thread.join(_LOOK_S)
                done = self._parts, partial_bytes(self._run_dir)
                if done != seen:
                    beat()
                seen = done
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"writing a checkpoint failed: {error!r}") from error

    def _write(self, snapshot: Snapshot) -> None:
        start_s = time.monotonic()
        try:
            save_checkpoint(self._run_dir, snapshot, self._keep, self._advance)
            self.saved_step = snapshot.step
        except Exception as error:  # handed to the training thread
            self._error = error
        finally:
            self.write_s = time.monotonic() - start_s

    def _advance(self) -> None:
        self._parts += 1
