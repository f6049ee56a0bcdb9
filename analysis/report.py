"""Everything about one or more runs in one HTML file that opens from disk, without a network."""

from __future__ import annotations

import argparse
import base64
import html
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis import actions, compare, episodes, lag, learning_curve, scaling, throughput, video
from analysis._common import (
    Analyse,
    Result,
    add_run_arguments,
    encode,
    guarded,
    write_new,
)
from analysis.errors import DataError
from analysis.reader import Run, open_runs, same_environment

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid #d8dee4; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } .note { color: #6a4a00; } .table { overflow-x: auto; }
"""
_MOST_ROWS = 25
_MOST_VIDEO_STEPS = 1000


class Section(NamedTuple):
    """One question of the report.

    Attributes:
      title: heading.
      analyse: what answers it.
      options: for it.
      recorded: whether it needs a recording.
      num_runs: it is asked of so many runs only; 0: of any number.
    """

    title: str
    analyse: Analyse
    options: Namespace
    recorded: bool = False
    num_runs: int = 0


SECTIONS = (
    Section(
        "Learning curve over frames",
        learning_curve.analyse,
        Namespace(x="frames", y="mean_return_100", statistics="own"),
    ),
    Section(
        "Learning curve over time",
        learning_curve.analyse,
        Namespace(x="wall_time_s", y="mean_return_100", statistics="own"),
    ),
    Section(
        "Learning curve over node-hours",
        learning_curve.analyse,
        Namespace(x="node_hours", y="mean_return_100", statistics="own"),
    ),
    Section(
        "Comparison",
        compare.analyse,
        Namespace(versus=None, last=100, statistics="own"),
        num_runs=2,
    ),
    Section("Throughput", throughput.analyse, Namespace()),
    Section("Scaling", scaling.analyse, Namespace()),
    Section("Policy lag, batches and waiting", lag.analyse, Namespace()),
    Section(
        "Episodes",
        episodes.analyse,
        Namespace(sort="return", limit=_MOST_ROWS, episode=None),
        recorded=True,
    ),
    Section("Actions and states", actions.analyse, Namespace(), recorded=True),
)


def overview(runs: list[Run]) -> pd.DataFrame:
    """Return one row per run: what it is and how it stands."""
    rows = []
    for run in runs:
        counters = run.status.get("counters") or {}
        rows.append(
            {
                "run": run.name,
                "environment": run.env_name,
                "state": run.status.get("state", "unknown"),
                "seed": run.config.get("run", {}).get("seed", ""),
                "frames": counters.get("frames"),
                "episodes": counters.get("episodes"),
                "training time [s]": counters.get("wall_time_s"),
                "mean return": run.status.get("mean_return_100"),
            }
        )
    return pd.DataFrame(rows)


def page(runs: list[Run]) -> str:
    """Return the HTML page.

    Raises:
      DataError: the runs don't go together, or a recording is damaged or unfinished.
    """
    same_environment(runs)
    for run in runs:
        if run.is_recorded:
            run.episodes()
    names = ", ".join(run.name for run in runs)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(names)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(names)}</h1>",
        _table(overview(runs)),
    ]
    for section in SECTIONS:
        if section.num_runs in (0, len(runs)):
            parts += _section(section, runs)
    parts += _videos([run for run in runs if run.is_recorded and run.image_leaf()])
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    parts += [f"<p class='note'>{html.escape(note)}</p>" for note in notes]
    return "\n".join([*parts, "</body></html>\n"])


def _section(section: Section, runs: list[Run]) -> Iterator[str]:
    yield f"<h2>{html.escape(section.title)}</h2>"
    usable = [run for run in runs if run.is_recorded] if section.recorded else runs
    if not usable:
        yield "<p class='note'>Nothing was recorded.</p>"
        return
    try:
        result = section.analyse(usable, section.options)
    except DataError as error:
        yield f"<p class='note'>{html.escape(str(error))}</p>"
        return
    yield from _show(result, section.title)


def _videos(runs: list[Run]) -> Iterator[str]:
    for run in runs:
        row = episodes.best_episode(run.episodes())
        kind = "mp4" if video.find_ffmpeg() else "gif"
        data = base64.b64encode(video.encode(run, row, kind, 2, 0.0, _MOST_VIDEO_STEPS)).decode()
        yield f"<h2>Episode {row} of {html.escape(run.name)}, the best</h2>"
        if kind == "mp4":
            yield f"<video controls src='data:video/mp4;base64,{data}'></video>"
        else:
            yield f"<img alt='Episode {row}' src='data:image/gif;base64,{data}'>"


def _show(result: Result, title: str) -> Iterator[str]:
    for note in result.notes:
        yield f"<p>{html.escape(note)}</p>"
    if result.figure is not None:
        picture = base64.b64encode(encode(result, "png")).decode()
        yield f"<img alt='{html.escape(title)}' src='data:image/png;base64,{picture}'>"
    if len(result.table) <= 2 * _MOST_ROWS:
        yield _table(result.table)


def _table(table: pd.DataFrame) -> str:
    text = table.to_html(index=False, border=0, na_rep="-", float_format=lambda v: f"{v:.4g}")
    return f"<div class='table'>{text}</div>"


def main(arguments: list[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser("python -m analysis.report", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    options = parser.parse_args(arguments)

    def act() -> None:
        if options.output.exists():
            raise DataError(f"{options.output} exists; nothing is written over")
        text = page(open_runs(options.runs, options.partial))
        write_new(options.output, text.encode())

    return guarded("report", act)


if __name__ == "__main__":
    sys.exit(main())
