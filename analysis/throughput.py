"""How fast is the run, and what does each role spend its time on?"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps

from analysis._common import Options, Result, command, figures_of, new_figure
from analysis.reader import Run

RATES = ("frames_per_s", "agent_steps_per_s", "env_steps_per_s", "learner_steps_per_s")
ROLES = ("actor", "inference", "worker", "learner")


def interval_weights(metrics: pd.DataFrame) -> np.ndarray:
    """Return the seconds of training that each record stands for, `[n]`."""
    seconds = metrics["wall_time_s"].diff().fillna(metrics["wall_time_s"].iloc[0])
    return np.maximum(seconds.to_numpy(np.float64), 0.0)


def weighted_mean(metrics: pd.DataFrame, name: str) -> float:
    """Return the mean of a metric over training time; short last records count little."""
    weights = interval_weights(metrics) * metrics[name].notna().to_numpy()
    if not weights.sum():
        return float("nan")
    return float(np.average(metrics[name].fillna(0.0), weights=weights))


def stages(metrics: pd.DataFrame, role: str) -> dict[str, float]:
    """Return the share of a role's time that each stage takes, by the stage's name."""
    names = [n for n in metrics if n.startswith(f"{role}_") and n.endswith("_share")]
    return {
        name.removeprefix(f"{role}_").removesuffix("_share"): weighted_mean(metrics, name)
        for name in names
    }


def analyse(runs: list[Run], options: Options) -> Result:
    """Return rates and shares by run, role and stage, and the figure."""
    figure, axes = new_figure(columns=2, height=4.4)
    rows, bars = [], []
    for run in runs:
        metrics = run.metrics()
        for name in figures_of(metrics, RATES):
            rows.append((run.name, "all", name, weighted_mean(metrics, name)))
        rates = figures_of(metrics, ["frames_per_s"])
        for name in rates:
            axes[0].plot(metrics["wall_time_s"][:-1], metrics[name][:-1], label=run.name)
        for role in ROLES:
            shares = stages(metrics, role)
            rows += [(run.name, role, f"{stage}_share", v) for stage, v in shares.items()]
            if shares:
                bars.append((f"{run.name}\n{role}", shares))
    axes[0].set_xlabel("training time [s]")
    axes[0].set_ylabel("emulator frames/s trained on")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    _draw_bars(axes[1], bars)
    return Result(pd.DataFrame(rows, columns=["run", "role", "figure", "mean"]), figure)


def _draw_bars(axes: Any, bars: list[tuple[str, dict[str, float]]]) -> None:
    left = np.zeros(len(bars))
    names = list(dict.fromkeys(stage for _, shares in bars for stage in shares))
    labels = [label for label, _ in bars]
    for index, name in enumerate(names):
        widths = np.array([shares.get(name, 0.0) for _, shares in bars])
        colour = colormaps["tab20"](index % 20)
        axes.barh(labels, widths, left=left, label=name, color=colour)
        left += widths
    axes.set_xlabel("share of the role's time")
    axes.invert_yaxis()
    axes.legend(fontsize="x-small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))


if __name__ == "__main__":
    sys.exit(command("throughput", __doc__, analyse))
