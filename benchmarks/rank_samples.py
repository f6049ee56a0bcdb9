"""Memory, handles and children of a job's ranks over time, and whether they grow."""

import os
import re
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil


class Sample(NamedTuple):
    """One look at one rank."""

    time_s: float
    rss_bytes: int
    handles: tuple[str, ...]
    threads: int
    zombies: int


class RankSamples:
    """Looks at ranks; a rank is its name and process, so that one started again is another."""

    def __init__(self, warm_up_s: float, shortest_s: float):
        self._warm_up_s, self._shortest_s = warm_up_s, shortest_s
        self._of: dict[tuple[str, int], list[Sample]] = defaultdict(list)

    def look(self, beats) -> None:
        """Note how every rank stands that `beats` tell of."""
        for beat in beats:
            try:
                process = psutil.Process(beat.pid)
                with process.oneshot():
                    sample = Sample(
                        time.monotonic(),
                        process.memory_info().rss,
                        _open_handles(beat.pid),
                        process.num_threads(),
                        sum(p.status() == psutil.STATUS_ZOMBIE for p in process.children()),
                    )
            except (psutil.Error, OSError):
                continue
            self._of[(beat.name, beat.pid)].append(sample)

    def growth(self) -> list[dict]:
        """First and last third after the warm-up of every rank that lived long enough."""
        rows = []
        for (name, pid), samples in self._of.items():
            warm = [s for s in samples if s.time_s >= samples[0].time_s + self._warm_up_s]
            lived_s = warm[-1].time_s - warm[0].time_s if warm else 0.0
            if lived_s < self._shortest_s:
                continue
            third = len(warm) // 3
            first, last = warm[:third], warm[-third:]
            before, after = (statistics.mean(s.rss_bytes for s in part) for part in (first, last))
            rows.append(
                {
                    "rank": name,
                    "pid": pid,
                    "seconds": round(lived_s),
                    "rss_mb": [round(before / 1e6, 1), round(after / 1e6, 1)],
                    "rss_growth": round(after / before - 1, 4),
                    "handles": [min(len(s.handles) for s in part) for part in (first, last)],
                    "handles_gained": _gained(first, last),
                    "threads": [min(s.threads for s in part) for part in (first, last)],
                    "lasting_zombies": _lasting([s.zombies for s in warm]),
                }
            )
        return rows


def _open_handles(pid: int) -> tuple[str, ...]:
    """What the handles of a process lead to; kinds without a name by their kind."""
    targets = []
    for handle in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{handle}").split(":[")[0])
        except FileNotFoundError:  # closed meanwhile
            continue
    return tuple(targets)


def _gained(first: list[Sample], last: list[Sample]) -> list[str]:
    """What is open in all of `last` more often than ever in `first`, but for the rank's own log.

    That is opened once, when a rank has something to say for the first time.
    """
    before, after = Counter[str](), Counter(last[0].handles)
    for sample in first:
        before |= Counter(sample.handles)
    for sample in last[1:]:
        after &= Counter(sample.handles)
    gained = (after - before).elements()
    return sorted(t for t in gained if not re.fullmatch(r".*/logs/rank-\d{5}\.log", t))


def _lasting(counts: list[int], looks: int = 3) -> int:
    """The most zombies that were there at several looks one after the other."""
    windows = [counts[i : i + looks] for i in range(len(counts) - looks + 1)]
    return max((min(window) for window in windows), default=0)


def files_below(folder: Path) -> list[str]:
    """Names of all files under a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
