"""The statistics of Agarwal et al. 2021 (arXiv 2108.13264) as the package rliable computes them.

Only its `metrics` are used: its intervals need arch below 8, which doesn't load beside pandas 3. An
interval is a percentile bootstrap over runs as in `statistics`, which for one environment is the
stratified bootstrap of rliable.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from analysis import statistics
from analysis.errors import DataError
from analysis.statistics import Floats, Statistic

SOURCES = ("own", "rliable")


def add_statistics_option(parser: argparse.ArgumentParser) -> None:
    """Add the choice of where the statistics come from."""
    parser.add_argument(
        "--statistics", choices=SOURCES, default="own", help="own, or those of the package rliable"
    )


class Statistics(NamedTuple):
    """Interquartile mean, mean, and P(second > first), from one source."""

    iqm: Statistic
    mean: Statistic
    probability_of_improvement: Any


def statistics_from(source: str) -> Statistics:
    """Return the statistics of `analysis.statistics` ("own") or of rliable.

    Raises:
      DataError: rliable isn't installed.
    """
    if source == "own":
        return Statistics(statistics.iqm, statistics.mean, statistics.probability_of_improvement)
    try:
        from rliable import metrics
    except ImportError:
        raise DataError(
            "--statistics rliable needs that package: pip install 'hpcrl[rliable]'; without it "
            "--statistics own computes the same"
        ) from None

    def along_last_axis(aggregate: Any) -> Statistic:
        def statistic(values: Floats) -> Floats:
            return np.apply_along_axis(lambda runs: aggregate(runs[:, None]), -1, values)

        return statistic

    def improvement(first: Floats, second: Floats) -> float:
        return float(metrics.probability_of_improvement(second[:, None], first[:, None]))

    return Statistics(
        along_last_axis(metrics.aggregate_iqm), along_last_axis(metrics.aggregate_mean), improvement
    )
