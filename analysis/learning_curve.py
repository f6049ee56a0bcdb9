"""How does the return rise? Curves of many runs, with the median and the quartiles over seeds.

Runs whose configurations differ only in seed and run directory are one group.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pandas as pd

from analysis._common import Options, Result, command, new_figure
from analysis.errors import DataError
from analysis.reader import Run, same_environment
from analysis.rliable_statistics import add_statistics_option, statistics_from
from analysis.statistics import bootstrap, on_grid

AXES = {
    "frames": "emulator frames",
    "agent_steps": "agent steps",
    "wall_time_s": "training time [s]",
    "node_hours": "node-hours",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the curves are drawn over and what they show."""
    parser.add_argument("--x", choices=AXES, default="frames", help="horizontal axis")
    parser.add_argument("--y", default="mean_return_100", help="a metric, such as eval/return")
    add_statistics_option(parser)


def group_key(run: Run) -> str:
    """Return what runs of one group share: their configuration without seed and directory."""
    own = ("seed", "dir", "resume", "deadline")
    section = {key: value for key, value in run.config.get("run", {}).items() if key not in own}
    config = {**run.config, "run": section}
    return json.dumps(config, sort_keys=True, default=str)


def group_runs(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the groups under short labels: the first run's name and the number of seeds."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(group_key(run), []).append(run)
    return {
        f"{members[0].name} ({len(members)} seed{'s' * (len(members) > 1)})": members
        for members in groups.values()
    }


def places(metrics: pd.DataFrame, x: str, y: str) -> np.ndarray:
    """Return where the values of `y` belong on axis `x`, `<float64>[n]`.

    An evaluation is reported when its last episode has ended. It belongs to where training was
    when the weights that it played with were made.
    """
    values = metrics[x].to_numpy(np.float64)
    if not y.startswith("eval/") or "eval/frames" not in metrics:
        return values
    played = metrics["eval/frames"].to_numpy(np.float64)
    if x == "frames":
        return played
    return np.interp(played, [0.0, *metrics["frames"]], [0.0, *values])


def curve(run: Run, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a run's curve, x strictly rising.

    Raises:
      DataError: the metric was not reported, or no value of it is a number yet.
    """
    metrics = run.metrics()
    if y not in metrics:
        known = ", ".join(sorted(metrics.columns))
        raise DataError(f"{run.path}: {y} was not reported; metrics there: {known}")
    points = pd.DataFrame({"x": places(metrics, x, y), "y": metrics[y]}).dropna()
    points = points[points["x"].diff().fillna(1) > 0]
    if points.empty:
        raise DataError(f"{run.path}: {y} has no value yet (has an episode ended?)")
    return points["x"].to_numpy(np.float64), points["y"].to_numpy(np.float64)


def analyse(runs: list[Run], options: Options) -> Result:
    """Return the table of all groups on their grids, and the figure."""
    same_environment(runs)
    figure, (axes,) = new_figure(height=4.2)
    frames, notes = [], []
    source = statistics_from(options.statistics)
    for label, members in group_runs(runs).items():
        curves = [curve(run, options.x, options.y) for run in members]
        (line,) = axes.plot([], [], label=label)
        for x, y in curves:
            alpha = 0.35 if len(curves) > 1 else 1.0
            axes.plot(x, y, color=line.get_color(), alpha=alpha, linewidth=1)
        try:
            grid, values = on_grid(curves)
        except ValueError as error:
            raise DataError(f"{label}: {error}") from None
        low, median, high = np.percentile(values, [25, 50, 75], axis=0)
        if len(curves) > 1:
            axes.plot(grid, median, color=line.get_color(), linewidth=2)
            axes.fill_between(grid, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        columns = {"group": label, options.x: grid, "median": median, "q25": low, "q75": high}
        frames.append(pd.DataFrame(columns))
        if len(curves) == 1:
            continue
        final = bootstrap(values[:, -1], source.iqm)
        notes.append(
            f"{label}: interquartile mean at {grid[-1]:.4g} {options.x} is {final.value:.4g}, "
            f"95 % interval over seeds {final.low:.4g} to {final.high:.4g}"
        )
    when = " when the evaluated weights were made" if options.y.startswith("eval/") else ""
    axes.set_xlabel(AXES[options.x] + when)
    axes.set_ylabel(options.y.replace("_", " "))
    axes.set_title(runs[0].env_name)
    axes.legend()
    return Result(pd.concat(frames, ignore_index=True), figure, notes)


if __name__ == "__main__":
    sys.exit(command("learning_curve", __doc__, analyse, add_options))
