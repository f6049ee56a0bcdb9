"""Which actions are taken, and which states are visited, early and late in the recording?"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis._common import Options, Result, command, new_figure
from analysis.lazy_column import LazyColumn
from analysis.reader import Run, same_environment

_PARTS = 4
_MOST_STATES = 20_000


def action_statistics(run: Run) -> pd.DataFrame:
    """Return one row per quarter of the recording and action (or component of a continuous one).

    A quarter in which no episode begins has none. Discrete: `share` of each category. Continuous:
    `mean` and `std` of each component.
    """
    actions = run.steps("action")
    discrete = np.issubdtype(actions.dtype, np.integer)
    rows: list[dict[str, Any]] = []
    for part, spans in enumerate(parts_of(run, _PARTS)):
        if not len(spans):
            continue  # fewer episodes than parts, or long ones
        values = np.concatenate([actions[first:last] for first, last in joined(spans)])
        for component in range(values.shape[1]):
            column = values[:, component]
            base = {"run": run.name, "quarter": part + 1, "component": component}
            if discrete:
                counts = np.bincount(column)
                shares = counts / counts.sum()
                rows += [base | {"action": a, "share": s} for a, s in enumerate(shares)]
            else:
                rows.append(base | {"mean": column.mean(), "std": column.std()})
    return pd.DataFrame(rows)


def parts_of(run: Run, count: int) -> list[NDArray[np.int64]]:
    """Return where the steps of each part of the training lie, `[n, 2]` first and last rows.

    The parts follow each other in time and hold about equally many steps, whole episodes each, so
    one may have none. Within one they are in the order of the files.
    """
    episodes = run.training_episodes().sort_values("end_unix_s", kind="stable")
    before = episodes["length"].cumsum().to_numpy() - episodes["length"].to_numpy()
    part = before * count // max(1, int(episodes["length"].sum()))
    spans = np.stack([episodes["start"], episodes["start"] + episodes["length"]], axis=1)
    return [np.sort(spans[part == number], axis=0) for number in range(count)]


def joined(spans: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ascending spans with those that touch put together, to read them at once."""
    breaks = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
    groups = np.split(spans, breaks)
    return [(int(group[0, 0]), int(group[-1, 1])) for group in groups if len(group)]


def sample_rows(column: LazyColumn, spans: NDArray[np.int64], most: int) -> NDArray[Any]:
    """Return up to `most` rows of `spans`, in runs of 32 at most that are spread evenly."""
    if not len(spans):
        return column[:0]
    block = 32
    total = int((spans[:, 1] - spans[:, 0]).sum())
    if total <= most:
        chosen = joined(spans)
    else:
        ends = np.cumsum(spans[:, 1] - spans[:, 0])
        wanted = np.linspace(0, total - 1, max(1, most // block)).astype(int)
        places = np.unique(np.searchsorted(ends, wanted, side="right"))
        chosen = [(int(a), int(min(a + block, b))) for a, b in spans[places]]
    return np.concatenate([column[first:last] for first, last in chosen])


def analyse(runs: list[Run], options: Options) -> Result:
    """Return action statistics of all runs and the figure of the first."""
    same_environment(runs)
    table = pd.concat([action_statistics(run) for run in runs], ignore_index=True)
    figure, axes = new_figure(columns=3, height=3.6)
    _draw_actions(axes[0], table[table["run"] == runs[0].name])
    leaf = runs[0].image_leaf()
    if leaf is not None:
        _draw_frames(axes[1:], runs[0], leaf)
    else:
        _draw_states(axes[1:], runs[0])
    figure.suptitle(f"{runs[0].name}: {runs[0].env_name}")
    return Result(table, figure)


def _draw_actions(axes: Any, table: pd.DataFrame) -> None:
    quarters = table["quarter"]
    first = table[table["component"] == 0]
    if "share" in table:
        for action, rows in first.groupby("action"):
            axes.plot(rows["quarter"], rows["share"], "o-", label=f"action {action}")
        axes.set_ylabel("share of steps")
        axes.set_ylim(0, 1.08 * first["share"].max())
    else:
        for component, rows in table.groupby("component"):
            axes.errorbar(rows["quarter"], rows["mean"], rows["std"], label=f"[{component}]")
        axes.set_ylabel("action, mean ± std")
    axes.set_xticks(sorted(quarters.unique()))
    axes.set_xlabel("quarter of the recording")
    axes.legend(fontsize="x-small")


def _halves(run: Run, column: LazyColumn, most: int) -> list[NDArray[Any]]:
    return [sample_rows(column, spans, most) for spans in parts_of(run, 2)]


def _draw_frames(axes: list[Any], run: Run, leaf: str) -> None:
    """Where pixels change: their standard deviation over sampled frames."""
    for axis, frames, half in zip(
        axes, _halves(run, run.steps(leaf), 1024), ("first", "second"), strict=True
    ):
        axis.axis("off")
        axis.set_title(_title("where pixels change", half, frames), fontsize="medium")
        if len(frames):
            spread = frames.astype(np.float32).std(axis=0)
            axis.imshow(spread if spread.ndim == 2 else spread.mean(-1), cmap="magma")


def _title(question: str, half: str, rows: NDArray[Any]) -> str:
    return f"{question}, {half} half" if len(rows) else f"no episode begins in the {half} half"


def _draw_states(axes: list[Any], run: Run) -> None:
    """Visits of the first two components of the observation, on the axes of both halves."""
    name = next((column for column in run.columns if column.startswith("observation/")), None)
    if name is None:
        return
    states = run.steps(name)
    width = int(np.prod(states.shape[1:]))
    second = min(1, width - 1)
    halves = [
        half.reshape(len(half), width)[:, [0, second]].astype(np.float64)
        for half in _halves(run, states, _MOST_STATES)
    ]
    low, high = np.percentile(np.concatenate(halves), [0.5, 99.5], axis=0)
    span = [[low[0], high[0] + 1e-9], [low[1], high[1] + 1e-9]]
    for axis, half, title in zip(axes, halves, ("first", "second"), strict=True):
        if len(half):
            axis.hist2d(half[:, 0], half[:, 1], bins=50, range=span, cmin=1)
        axis.grid(visible=False)
        axis.set_title(_title("states visited", title, half), fontsize="medium")
        axis.set_xlabel(f"{name.removeprefix('observation/')}[0]")
        axis.set_ylabel(f"{name.removeprefix('observation/')}[{second}]")


if __name__ == "__main__":
    sys.exit(command("actions", __doc__, analyse))
