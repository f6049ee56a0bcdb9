"""Starts `killed_recorder` for tests."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "trajectories/inference-0-1/seg-00000.h5.part"
"""The open segment in its run directory."""


def start_recorder(run: Path, flushed: int) -> subprocess.Popen:
    """Start a recorder that kills itself once `flushed` episodes are in the run's segment."""
    command = [sys.executable, "-m", "tests.analysis.killed_recorder"]
    return subprocess.Popen([*command, str((run / NAME).parent), str(flushed)], cwd=ROOT)


def killed_recorder(run: Path, flushed: int) -> Path:
    """Return the open segment of one that is dead, all that it left."""
    assert start_recorder(run, flushed).wait(100) == -signal.SIGKILL
    assert list((run / NAME).parent.iterdir()) == [run / NAME]
    return run / NAME
