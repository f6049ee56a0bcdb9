"""Which episodes were recorded? A table, their returns and lengths, and one episode's frames."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import pandas as pd

from analysis._common import Options, Result, command, new_figure
from analysis.errors import DataError
from analysis.reader import Run, same_environment

_STRIP_FRAMES = 8
_SHOWN = (
    "run",
    "row",
    "env_id",
    "episode",
    "return",
    "length",
    "complete",
    "terminated",
    "truncated",
    "evaluation",
    "first_policy_version",
    "last_policy_version",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the order of the table and the episode that is shown."""
    parser.add_argument("--sort", default="row", choices=("row", "return", "length"))
    parser.add_argument("--limit", type=int, default=0, help="lines of the table; 0: all")
    parser.add_argument(
        "--episode", type=int, default=None, help="row to show; the best of the first run if absent"
    )


def best_episode(episodes: pd.DataFrame) -> int:
    """Return the row of the complete episode with the highest return."""
    complete = episodes[episodes["complete"]]
    return int((complete if len(complete) else episodes)["return"].idxmax())


def analyse(runs: list[Run], options: Options) -> Result:
    """Return the table, and a figure with returns, lengths and one episode."""
    same_environment(runs)
    tables = [run.episodes().assign(row=lambda frame: frame.index) for run in runs]
    table = pd.concat(tables, ignore_index=True)
    if options.sort != "row":
        table = table.sort_values(options.sort, ascending=False)
    shown = options.episode if options.episode is not None else best_episode(tables[0])
    figure = draw(runs, tables, shown)
    table = table[list(_SHOWN)]
    return Result(table.head(options.limit) if options.limit else table, figure)


def draw(runs: list[Run], tables: list[pd.DataFrame], shown: int) -> Any:
    """Return the figure: returns in order of their end, lengths, and episode `shown` of runs[0]."""
    figure, (returns, lengths, *strip) = new_figure(columns=2, rows=2, height=3.0)
    for run, table in zip(runs, tables, strict=True):
        ended = table[table["complete"]].sort_values("end_unix_s")
        minutes = (ended["end_unix_s"] - ended["end_unix_s"].min()) / 60
        returns.plot(minutes, ended["return"], ".", markersize=3, label=run.name)
        lengths.hist(ended["length"], bins=40, alpha=0.6, label=run.name)
    returns.set_xlabel("minutes since the first end of an episode")
    returns.set_ylabel("episode return")
    returns.legend()
    lengths.set_xlabel("episode length [agent steps]")
    lengths.set_ylabel("episodes")
    grid = strip[0].get_gridspec()
    for axis in strip:
        axis.remove()
    below = figure.add_subplot(grid[1, :])
    show_episode(below, runs[0], shown)
    return figure


def show_episode(axes: Any, run: Run, number: int) -> None:
    """Draw one episode: a strip of frames, or the observation's first components over time."""
    leaf = run.image_leaf()
    episode = run.episode(number)
    total = float(episode["reward"].sum())
    title = f"{run.name}: episode {number}, return {total:g}, {len(episode['reward'])} steps"
    axes.set_title(title, fontsize="medium")
    if leaf is not None:
        places = np.linspace(0, len(episode[leaf]) - 1, _STRIP_FRAMES).astype(int)
        gap = ((0, 0), (0, 2), (0, 0))[: episode[leaf].ndim - 1]
        shown = [np.pad(frame, gap, constant_values=255) for frame in episode[leaf][places]]
        frames = np.concatenate(shown, axis=1)
        axes.imshow(frames, cmap="gray" if frames.ndim == 2 else None, vmin=0, vmax=255)
        width = frames.shape[1] / _STRIP_FRAMES
        axes.set_xticks([(i + 0.5) * width for i in range(_STRIP_FRAMES)], places.tolist())
        axes.set_yticks([])
        axes.grid(False)
    else:
        for name, values in vector_columns(episode).items():
            axes.plot(values, label=name, linewidth=1)
        axes.legend(fontsize="x-small")
    axes.set_xlabel("agent step")


def vector_columns(episode: dict[str, np.ndarray], most: int = 6) -> dict[str, np.ndarray]:
    """Return the first components of the observations by name, `[T]` each."""
    found = {}
    for name, values in episode.items():
        if name.startswith("observation/"):
            flat = values.reshape(len(values), -1)
            for component in range(flat.shape[1]):
                label = f"{name.removeprefix('observation/')}[{component}]"
                found[label] = flat[:, component]
    if not found:
        raise DataError("no observations were recorded (recording.fields has no observation)")
    return dict(list(found.items())[:most])


if __name__ == "__main__":
    sys.exit(command("episodes", __doc__, analyse, add_options))
