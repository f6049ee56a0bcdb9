"""`hpcrl bench inference`: an inference rank at full load against the bare network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from hpcrl.bench.ranks import run_ranks
from hpcrl.bench.result import Chart, Result, Sheet
from hpcrl.config.load import load_config, to_dict

GOAL = 0.9
_START_S = 90.0


def bench_inference(path: str, overrides: Sequence[str], actors: int, seconds: float) -> Result:
    """Load one inference rank with `actors` that never step.

    Args:
      path: the configuration, of a layout with inference ranks.
      overrides: of its keys.
      actors: ranks that send steps as fast as actions come.
      seconds: of full load.
    """
    data = to_dict(load_config(path, overrides))
    data["topology"] |= {"learners": 1, "inference": 1, "actors": actors, "ranks": 0}
    data["metrics"]["every_s"] = 1.0
    # A sink that is never behind, so that nothing but the inference rank is measured.
    data["learner"]["queue_unrolls"] = data["inference"]["credits_unrolls"] = 64
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        arguments = {
            "config": data,
            "run_dir": folder,
            "seconds": seconds,
            "bare_seconds": min(2.0, seconds / 2),
        }
        program = ("-m", "hpcrl.bench.inference_ranks")
        limit_s = 3 * seconds + _START_S + 5.0 * actors
        return summarise(run_ranks(program, actors + 2, arguments, limit_s), actors)


def summarise(found: dict[str, Any], actors: int) -> Result:
    """Return the result of what the ranks found."""
    quantiles = ("mean", "p50", "p90", "p99")
    spreads = [
        ("rows of a batch", found["batch_rows"]),
        ("wait of a batch's first row, ms", found["first_row_wait_ms"]),
        ("step to actions at the actor, ms", found["latency_ms"]),
    ]
    rates = [
        ("inference rank", found["rows_per_s"]),
        (f"bare network at {found['bare_rows']} rows", found["bare_rows_per_s"]),
    ]
    stages = sorted(found["stages"].items(), key=lambda stage: -stage[1])
    histogram = [(rows, float(count)) for rows, count in found["batch_rows_histogram"].items()]
    return Result(
        "inference",
        found["ratio"],
        f"rows/s of an inference rank at full load over the bare network's (goal >= {GOAL})",
        {"actors": actors, "cores": len(os.sched_getaffinity(0)), **found},
        [
            Sheet(
                "under load", ("", *quantiles), [(n, *map(s.get, quantiles)) for n, s in spreads]
            ),
            Sheet("rows per second", ("", "rows/s"), rates),
            Sheet("time of the inference rank", ("stage", "share"), stages),
        ],
        [Chart("batches by size", "rows", "batches", {"batches": histogram}, "bars")],
    )
