"""One log file per rank that has something to say."""

from __future__ import annotations

import faulthandler
import logging
from pathlib import Path

log = logging.getLogger("hpcrl")
log.addHandler(logging.NullHandler())  # else what is logged before `log_to` goes to stderr


def log_to(run_dir: Path, rank: int, restart: int) -> None:
    """Send warnings and errors of this process to RUN/logs/rank-NNNNN.log, made when needed."""
    path = run_dir / "logs" / f"rank-{rank:05d}.log"
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s restart {restart} rank {rank} %(levelname)s %(message)s")
    )
    logging.getLogger().addHandler(handler)
    faulthandler.enable()
