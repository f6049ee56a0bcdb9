"""How old are the weights that act and the items that a replay gives, and how long do rows wait?

Policy lag is in learner steps, measured by the learner on what it trains on. Training reports
means of each report interval (`metrics.every_s`), so quantiles are those of such means over
training time: single unrolls, batches and rows spread wider. A recording with `policy_version`
also shows how often the weights changed within an episode; those quantiles are over episodes.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis._common import Options, Result, command, figures_of, new_figure
from analysis.errors import DataError
from analysis.reader import Run
from analysis.throughput import interval_weights

FIGURES = {
    "policy_lag": "mean policy lag [learner steps]",
    "batch_rows": "mean inference batch [rows]",
    "row_wait_ms": "mean of first rows' waits [ms]",
    "queue_fill": "learner queue fill [share]",
    "replay_age_unrolls": "mean age of replayed items [unrolls stored since]",
    "priority_age_draws": "mean age of priorities [draws since]",
    "priority_mean": "mean priority",
    "priority_max": "largest priority",
    "weight_changes": "weight changes within an episode",
}
_QUANTILES = (0.1, 0.5, 0.9, 0.99)


def weighted_quantiles(values: np.ndarray, weights: np.ndarray) -> list[float]:
    """Return the quantiles `_QUANTILES` of a distribution given by values and weights."""
    order = np.argsort(values)
    mass = np.cumsum(weights[order])
    places = np.searchsorted(mass, np.array(_QUANTILES) * mass[-1])
    return [float(values[order][place]) for place in places]


def samples(run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return values and weights of every figure that the run has."""
    metrics = run.metrics()
    found = {}
    for name in figures_of(metrics, list(FIGURES)):
        keep = metrics[name].notna().to_numpy()
        weights = interval_weights(metrics)[keep]
        if weights.sum() > 0:
            found[name] = (metrics[name].to_numpy(np.float64)[keep], weights)
    if run.is_recorded:
        episodes = run.training_episodes()
        known = episodes[episodes["first_policy_version"] >= 0]
        changes = (known["last_policy_version"] - known["first_policy_version"]).to_numpy(
            np.float64
        )
        if len(changes):
            found["weight_changes"] = (changes, np.ones(len(changes)))
    return found


def analyse(runs: list[Run], options: Options) -> Result:
    """Return mean and quantiles of every figure, over what they are, and their distributions."""
    by_run = [(run, samples(run)) for run in runs]
    names = [name for name in FIGURES if any(name in found for _, found in by_run)]
    if not names:
        raise DataError(f"{runs[0].path}: none of {', '.join(FIGURES)} was reported")
    figure, axes = new_figure(columns=2, rows=-(-len(names) // 2), height=2.8)
    rows = []
    for name, axis in zip(names, axes, strict=False):
        over = "episodes" if name == "weight_changes" else "report intervals"
        axis.set_xlabel(FIGURES[name])
        for run, found in by_run:
            if name not in found:
                continue
            values, weights = found[name]
            mean = float(np.average(values, weights=weights))
            rows.append((run.name, name, over, mean, *weighted_quantiles(values, weights)))
            order = np.argsort(values)
            share = np.cumsum(weights[order]) / weights.sum()
            axis.step(values[order], share, where="post", label=run.name)
        axis.set_ylabel(f"share of {over} at or below", fontsize="small")
        axis.set_ylim(0, 1.02)
        axis.xaxis.set_major_locator(MaxNLocator(6))
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    axes[0].legend()
    quantiles = [f"p{round(100 * q)}" for q in _QUANTILES]
    return Result(pd.DataFrame(rows, columns=["run", "figure", "over", "mean", *quantiles]), figure)


if __name__ == "__main__":
    sys.exit(command("lag", __doc__, analyse))
