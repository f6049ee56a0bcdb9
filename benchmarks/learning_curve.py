"""Keep a run's learning curve as a small CSV file and a picture.

    hpcrl train configs/breakout_vtrace.yaml --run.dir runs/breakout
    python benchmarks/learning_curve.py runs/breakout benchmarks/results/breakout_vtrace

Writes PREFIX.csv (frames, agent steps, seconds of training, mean return of the last 100
episodes) and PREFIX.png.
"""

import argparse
import csv
from pathlib import Path

from hpcrl.run.metrics import read_metrics
from hpcrl.run.report import draw_learning_curve, learning_curve

COLUMNS = ("frames", "agent_steps", "learner_steps", "wall_time_s", "restart", "mean_return_100")


def main() -> None:
    """Read the run and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--every-s", type=float, default=15.0, help="seconds between points")
    arguments = parser.parse_args()
    records = read_metrics(arguments.run)
    kept, next_s = [], 0.0
    for record in records:
        if record["wall_time_s"] >= next_s or record is records[-1]:
            kept.append(record)
            next_s = record["wall_time_s"] + arguments.every_s
    with arguments.prefix.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: _short(r[name]) for name in COLUMNS} for r in kept)
    figure = draw_learning_curve(learning_curve(kept), arguments.prefix.name)
    figure.savefig(arguments.prefix.with_suffix(".png"), dpi=80)


def _short(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
