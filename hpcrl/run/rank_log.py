"""One log file per rank that has something to say."""

from __future__ import annotations

import faulthandler
import logging
from pathlib import Path

log = logging.getLogger("hpcrl")
log.addHandler(logging.NullHandler())  # else what is logged before `log_to` goes to stderr


_run_dir: Path | None = None


def log_folder() -> Path | None:
    """Return the run directory that this process logs to, None before it does."""
    return _run_dir


def log_to(run_dir: Path, rank: int, restart: int) -> None:
    """Send warnings and errors of this process to RUN/logs/rank-NNNNN.log, made when needed."""
    global _run_dir
    _run_dir = run_dir
    path = run_dir / "logs" / f"rank-{rank:05d}.log"
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s restart {restart} rank {rank} %(levelname)s %(message)s")
    )
    logging.getLogger().addHandler(handler)
    faulthandler.enable()
    logging.raiseExceptions = False  # a full disk is reported where it matters
