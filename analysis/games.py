"""What do the games come to? One line for each game of many evaluated runs, and their median.

Reads the summary that `hpcrl eval` leaves in RUN/evaluations, the one of the latest checkpoint.
Runs of one game, such as seeds, are averaged. The score of a game is human-normalised: 0 is
random play, 1 a professional human tester. The median over games is the usual headline.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from analysis._common import Options, Result, command
from analysis.errors import DataError
from analysis.reader import Run

_FOLDER = re.compile(r"step-(\d+)-(\d+)")
_COLUMNS = ("env_name", "mean_return", "human_normalised", "episodes", "frames")


def latest_summary(run: Path) -> dict[str, Any]:
    """Return the newest evaluation of a run.

    Raises:
      DataError: it was never evaluated, or the file is damaged.
    """
    found = [
        (int(match[1]), int(match[2]), folder / "summary.json")
        for folder in (run / "evaluations").glob("step-*")
        if (match := _FOLDER.fullmatch(folder.name)) and (folder / "summary.json").exists()
    ]
    if not found:
        raise DataError(f"{run} has no evaluation: run `hpcrl eval {run}` first")
    path = max(found)[2]
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return {name: summary[name] for name in _COLUMNS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}") from error


def analyse(runs: list[Run], options: Options) -> Result:
    """Return a line for each game, and the median and mean of their scores."""
    frame = pd.DataFrame([latest_summary(run.path) for run in runs])
    frame["human_normalised"] = frame["human_normalised"].astype(float)
    games = (
        frame.groupby("env_name")
        .agg(
            runs=("mean_return", "size"),
            episodes=("episodes", "sum"),
            frames=("frames", "min"),
            mean_return=("mean_return", "mean"),
            human_normalised=("human_normalised", "mean"),
        )
        .reset_index()
        .rename(columns={"env_name": "game"})
    )
    scores = games["human_normalised"].dropna()
    notes = []
    if len(scores) < len(games):
        unknown = games.loc[games["human_normalised"].isna(), "game"].tolist()
        notes.append(f"no reference scores for {', '.join(unknown)}: left out of median and mean")
    summary = pd.DataFrame(
        {
            "game": [f"median of {len(scores)} games", f"mean of {len(scores)} games"],
            "human_normalised": [scores.median(), scores.mean()],
        }
    )
    return Result(pd.concat([games, summary], ignore_index=True), notes=notes)


def main(arguments: list[str] | None = None) -> int:
    """Print or write the table."""
    return command("games", __doc__, analyse, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
