"""Is one set of runs better than another? Differences with bootstrap confidence intervals.

Several runs a side: the unit is the run, by its mean return over the last episodes. One run a
side: the unit is the recorded episode; the interval then says nothing of other seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis._common import Options, Result, command, new_figure
from analysis.errors import DataError
from analysis.reader import Run, open_runs, same_environment
from analysis.rliable_statistics import add_statistics_option, statistics_from
from analysis.statistics import bootstrap, bootstrap_difference, iqm
from analysis.throughput import weighted_mean


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the other side and how much of the end counts."""
    parser.add_argument(
        "--versus", nargs="+", type=Path, metavar="RUN", help="the other side's runs"
    )
    parser.add_argument("--last", type=int, default=100, help="episodes at the end that count")
    add_statistics_option(parser)


def scores(runs: list[Run], last: int, by_episode: bool) -> tuple[np.ndarray, str]:
    """Return one side's independent samples `[n]` and what they are.

    Args:
      runs: of the side.
      last: episodes at the end of a run that count.
      by_episode: compare the episodes of one run a side, where they are recorded.

    Raises:
      DataError: no episode has ended.
    """
    if by_episode:
        episodes = runs[0].training_episodes()
        ended = episodes[episodes["complete"]].sort_values("end_unix_s")
        if ended.empty:
            raise DataError(f"{runs[0].path}: no complete episode is recorded")
        return ended["return"].to_numpy(np.float64)[-last:], "episodes"
    finals = []
    for run in runs:
        metrics = run.metrics()
        known = metrics["mean_return_100"].dropna() if "mean_return_100" in metrics else None
        if known is None or known.empty:
            raise DataError(f"{run.path}: no episode has ended, so there is nothing to compare")
        finals.append(float(known.iloc[-1]))
    return np.array(finals), "runs"


def analyse(runs: list[Run], options: Options) -> Result:
    """Return the table of both sides and their differences, and the distributions."""
    if options.versus is None:
        if len(runs) != 2:
            raise DataError("give two runs, or the other side's runs after --versus")
        first, second = runs[:1], runs[1:]
    else:
        paths = [*(run.path for run in runs), *options.versus]
        both = open_runs(paths, options.partial)
        first, second = both[: len(runs)], both[len(runs) :]
    same_environment([*first, *second])
    sides = [first, second]
    by_episode = all(len(side) == 1 and side[0].is_recorded for side in sides)
    (a, unit), (b, _) = (scores(side, options.last, by_episode) for side in sides)
    rows = []
    source = statistics_from(options.statistics)
    statistics = {"mean return": source.mean, "interquartile mean return": source.iqm}
    for name, statistic in statistics.items():
        difference = bootstrap_difference(a, b, statistic)
        rows += [
            ("first", name, *bootstrap(a, statistic)),
            ("second", name, *bootstrap(b, statistic)),
            ("second - first", name, *difference),
        ]
    better = source.probability_of_improvement(a, b)
    rows.append(("second > first", "probability", better, np.nan, np.nan))
    for side, members in (("first", first), ("second", second)):
        rates = [weighted_mean(run.metrics(), "frames_per_s") for run in members]
        rows.append((side, "frames/s", float(np.mean(rates)), np.nan, np.nan))
    table = pd.DataFrame(rows, columns=["side", "figure", "value", "low", "high"])
    labels = [" ".join(run.name for run in side) for side in (first, second)]
    notes = [
        f"first: {labels[0]}; second: {labels[1]}; {len(a)} and {len(b)} {unit}, 95 % intervals"
    ]
    if unit == "episodes":
        notes.append("episodes of one run each: the intervals say nothing of other seeds")
    notes += [note for run in [*first, *second] for note in run.notes]
    return Result(table, _draw([a, b], labels), notes)


def _draw(samples: list[np.ndarray], labels: list[str]) -> Figure:
    figure, (axes,) = new_figure()
    for place, values in enumerate(samples):
        jitter = np.random.default_rng(0).uniform(-0.12, 0.12, len(values))
        axes.plot(values, place + jitter, ".", alpha=0.5)
        estimate = bootstrap(values, iqm)
        error = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
        axes.errorbar(estimate.value, place + 0.25, xerr=error, fmt="ks", capsize=4)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.5, len(labels) - 0.5)
    axes.set_xlabel("return; square: interquartile mean, 95 % interval")
    return figure


if __name__ == "__main__":
    sys.exit(command("compare", __doc__, analyse, add_options))
