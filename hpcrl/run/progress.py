"""The progress display of learner rank 0: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hpcrl.config.sections import StopConfig
from hpcrl.human import format_count, format_duration, format_return, format_share
from hpcrl.node.slurm_env import is_launched

Mode = Literal["auto", "live", "plain"]
Values = Mapping[str, Any]

_FIELDS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("frames", "frames", format_count),
    ("agent_steps", "agent steps", format_count),
    ("frames_per_s", "frames/s", format_count),
    ("learner_steps_per_s", "learner steps/s", format_count),
    ("policy_lag", "policy lag", format_count),
    ("batch_fill", "batch fill", format_share),
    ("queue_fill", "queue fill", format_share),
)
"""Metric, label and format, in order of display; return and time left come after them."""


def choose_mode(mode: Mode, is_terminal: bool, environ: Mapping[str, str]) -> Mode:
    """Resolve `auto` to live or plain.

    `HPCRL_TTY` (1 or 0), which the local launcher sets from the user's terminal, goes before
    `is_terminal`: a launcher may give a rank a terminal where the user has redirected the output.
    """
    if mode != "auto":
        return mode
    if environ.get("TERM", "") in ("", "dumb", "unknown"):
        return "plain"
    told = environ.get("HPCRL_TTY")
    if told in ("0", "1"):
        return "live" if told == "1" else "plain"
    return "live" if is_terminal and not is_launched(environ) else "plain"


class TimeLeft:
    """Seconds until the first stop condition holds, at the mean rates since the first call."""

    def __init__(self, stop: StopConfig):
        limits = {name: getattr(stop, name) for name in ("frames", "agent_steps", "wall_time_s")}
        self._limits = {name: limit for name, limit in limits.items() if limit}
        self._first: dict[str, float] | None = None

    def seconds(self, values: Values) -> float | None:
        """Return the estimate, None when no condition is set or no rate is known yet."""
        now = {name: float(values[name]) for name in ("frames", "agent_steps", "wall_time_s")}
        if self._first is None:
            self._first = now
        elapsed_s = now["wall_time_s"] - self._first["wall_time_s"]
        left = []
        for name, limit in self._limits.items():
            rate = (now[name] - self._first[name]) / elapsed_s if elapsed_s > 0 else 0.0
            if name == "wall_time_s":
                rate = 1.0
            if now[name] >= limit:
                return 0.0
            if rate > 0:
                left.append((limit - now[name]) / rate)
        return min(left, default=None)


class Progress:
    """Shows records of metrics as they come. A display that fails never ends the run.

    Args:
      title: such as the run directory.
      stop: for the time left.
      mode: see `choose_mode`.
      plain_every_s: shortest time between two plain lines.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        title: str,
        stop: StopConfig,
        mode: Mode = "auto",
        plain_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._title = title
        self._time_left = TimeLeft(stop)
        self._every_s = plain_every_s
        self._clock = clock
        self._next_s = -float("inf")
        self._unprinted: Values | None = None
        self._broken = False
        self._live: Live | None = None
        self.mode = choose_mode(mode, sys.stdout.isatty(), os.environ)
        if self.mode == "live":
            # Refreshed by `update` alone: no thread that wakes beside the learner.
            console = Console(force_terminal=True)
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            self._show(Live.start)

    def update(self, values: Values) -> None:
        """Show a record of metrics.

        frames, agent_steps and wall_time_s are needed; what else is missing shows as `-`.
        """
        cells = _cells(values, self._time_left.seconds(values))
        if self._live is not None:
            self._show(lambda live: live.update(_panel(self._title, cells), refresh=True))
        elif self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self._print(_line(cells))
            self._unprinted = None
        else:
            self._unprinted = values

    def say(self, text: str) -> None:
        """Print a line, above the panel when there is one."""
        if self._live is not None:
            self._show(lambda live: live.console.print(Text(text)))
        else:
            self._print(text)

    def close(self) -> None:
        """Show the last record if it was not shown yet, and give the terminal back."""
        if self._unprinted is not None:
            self._print(_line(_cells(self._unprinted, self._time_left.seconds(self._unprinted))))
            self._unprinted = None
        if self._live is not None:
            self._show(Live.stop)
            self._live = None

    def _show(self, action: Callable[[Live], object]) -> None:
        if self._broken or self._live is None:
            return
        try:
            action(self._live)
        except OSError:
            self._broken = True

    def _print(self, text: str) -> None:
        if self._broken:
            return
        try:
            print(text, flush=True)
        except OSError:
            self._broken = True


def _cells(values: Values, left_s: float | None) -> list[tuple[str, str]]:
    """Return (label, text) pairs."""
    cells = [(label, form(values.get(name))) for name, label, form in _FIELDS]
    score = format_return(values.get("mean_return_100"), values.get("episodes_100"))
    cells.insert(3, ("return", score))
    if values.get("eval/return") is not None:
        cells.insert(4, ("eval return", format_return(values["eval/return"], None)))
    if values.get("env_restarts"):
        cells.append(("env restarts", format_count(values["env_restarts"])))
    return [*cells, ("time left", format_duration(left_s))]


def _line(cells: list[tuple[str, str]]) -> str:
    return " | ".join(f"{label} {text}" for label, text in cells)


def _panel(title: str, cells: list[tuple[str, str]]) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    columns = 3
    for _ in range(columns):
        grid.add_column()
        grid.add_column(justify="right")
    for start in range(0, len(cells), columns):
        row = cells[start : start + columns]
        grid.add_row(*(text for label, value in row for text in (Text(label, "dim"), value)))
    return Panel(grid, title=Text(title), title_align="left")
