"""How does throughput grow with the job? One line per run, efficiency against the smallest."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis._common import Options, Result, command, new_figure
from analysis.reader import Run, same_environment
from analysis.throughput import weighted_mean

ROLES = ("learner", "inference", "actor", "worker", "evaluator")


def job_size(run: Run) -> dict[str, int]:
    """Return nodes, ranks, cores and ranks of each role."""
    ranks = run.topology.get("ranks", [])
    roles = Counter(rank["role"] for rank in ranks)
    cores = sum(node["num_cores"] for node in run.topology.get("nodes", []))
    return {
        "nodes": run.num_nodes,
        "cores": cores,
        "ranks": len(ranks),
        **{f"{role}s" if role != "inference" else role: n for role, n in roles.items()},
    }


def analyse(runs: list[Run], options: Options) -> Result:
    """Return the table in order of size, and frames/s and efficiency over ranks."""
    same_environment(runs)
    rows = []
    for run in runs:
        metrics = run.metrics()
        steady = metrics.iloc[1:] if len(metrics) > 2 else metrics
        rates = {
            name: weighted_mean(steady, name)
            for name in ("frames_per_s", "learner_steps_per_s")
            if name in steady
        }
        rows.append({"run": run.name, **job_size(run), **rates})
    table = pd.DataFrame(rows).sort_values(["ranks", "run"], ignore_index=True)
    counts = [name for name in table if name.removesuffix("s") in ROLES]
    table[counts] = table[counts].fillna(0).astype(int)
    per_rank = table["frames_per_s"] / table["ranks"].clip(lower=1)
    table["frames_per_s_and_rank"] = per_rank
    table["efficiency"] = per_rank / per_rank.iloc[0]
    figure, (rate, efficiency) = new_figure(columns=2)
    rate.plot(table["ranks"], table["frames_per_s"], "o")
    ideal = np.array([0, table["ranks"].max()])
    rate.plot(ideal, ideal * per_rank.iloc[0], "--", color="grey", label="proportional")
    rate.set_ylabel("emulator frames/s")
    rate.set_ylim(0, 1.15 * table["frames_per_s"].max())
    rate.legend()
    efficiency.plot(table["ranks"], table["efficiency"], "o")
    efficiency.set_ylabel("efficiency per rank")
    efficiency.set_ylim(0, 1.15 * table["efficiency"].max())
    for axis in (rate, efficiency):
        axis.set_xlabel("ranks")
        axis.set_xlim(0, 1.15 * max(1, table["ranks"].max()))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return Result(table, figure)


if __name__ == "__main__":
    sys.exit(command("scaling", __doc__, analyse))
