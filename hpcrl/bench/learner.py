"""`hpcrl bench learner`: a learner's steps against a bare loop, and every gradient backend."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from hpcrl.bench.ranks import BenchError, benchmark_script, run_ranks
from hpcrl.bench.result import Chart, Result, Sheet
from hpcrl.config.load import load_config, to_dict
from hpcrl.config.root import Config

GOAL, STALL_GOAL, CHECKPOINT_GOAL = 0.95, 0.02, 1.0
BACKENDS = ("mpi", "torch", "horovod")

_START_S = 90.0
_SIZES = (10_000, 1_700_000)
"""Parameters of a small MLP and of Nature CNN with 512 units."""


def bench_learner(
    path: str, overrides: Sequence[str], seconds: float, learners: int, rounds: int
) -> Result:
    """Flood one learner with unrolls; then sum gradients over `learners` ranks.

    Args:
      path: the configuration.
      overrides: of its keys.
      seconds: of training, and of all rounds of sums about as many.
      learners: ranks that sum gradients.
      rounds: of sums.
    """
    found = flood_learner(load_config(path, overrides), seconds)
    sums = run_ranks(
        [str(benchmark_script("allreduce_ranks.py"))],
        learners,
        {
            "backends": BACKENDS,
            "sizes": _SIZES,
            "rounds": rounds,
            "cores": len(os.sched_getaffinity(0)),
        },
        _START_S + rounds,
    )
    return summarise(found, sums["cases"])


def flood_learner(config: Config, seconds: float) -> dict[str, Any]:
    """Let one learner train for `seconds` on all it can take; return what its ranks found."""
    if config.layout == "async_gradient":
        raise BenchError("layout async_gradient: no learner takes unrolls; see bench system")
    data = flooded(config, seconds)
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        arguments = {"config": data, "run_dir": f"{folder}/run", "seconds": seconds}
        program = ("-m", "hpcrl.bench.learner_ranks")
        ranks = 3 if data["layout"] == "replay" else 2
        return run_ranks(program, ranks, arguments, 3 * seconds + _START_S)


def flooded(config: Config, seconds: float) -> dict[str, Any]:
    """Return the configuration's data with one learner, one client and frequent checkpoints.

    Without a replay the client is a worker. A replay begins as soon as it has a few batches.
    """
    data = to_dict(config)
    data["topology"] |= {"learners": 1, "inference": "auto", "actors": 1, "ranks": 0}
    if config.layout == "replay":
        data["topology"]["inference"] = 1
        few = 4 * config.learner.batch_unrolls
        data["replay"] |= {"min_size_unrolls": few, "capacity_unrolls": 2 * few + 8}
    else:
        data |= {"layout": "sync" if config.layout == "sync" else "impala", "placement": "local"}
    data["stop"] = {"wall_time_s": seconds}
    data["learner"]["optimizer"]["schedule"] = "constant"
    data["checkpoint"] |= {"every_s": max(seconds / 6, 0.2), "keep": 1, "replay": "none"}
    data["metrics"] |= {"every_s": 1.0, "tensorboard": False}
    return data


def summarise(found: dict[str, Any], sums: Sequence[dict[str, Any]]) -> Result:
    """Return the result of what the ranks found."""
    learner = found["learners"][0]
    stall, copy = learner["publish_share"], learner["checkpoint_stall_steps"]
    rates = [
        ("learner", learner["steps_per_s"]),
        ("bare loop", learner["bare_steps_per_s"]),
    ]
    stalls = [
        (f"publishing weights, share (goal <= {STALL_GOAL})", stall),
        (f"a checkpoint, steps (goal <= {CHECKPOINT_GOAL:g})", copy),
        ("copies of the weights sent", found["copies_received"]),
    ]
    names = list(sums[0]["ms"])
    rows = [(f"{c['values']:,} x {c['learners']}", *(c["ms"][n] for n in names)) for c in sums]
    stages = list(learner["stages"].items())
    library = sums[-1]["fastest_tenth_ms"]
    return Result(
        "learner",
        learner["ratio"],
        f"steps/s of a learner over a bare loop's (goal >= {GOAL})",
        {
            **learner,
            "all_reduce": sums,
            "all_reduce_over_library": {n: library[n] / library["mpi_library"] for n in names},
        },
        [
            Sheet("learner steps", ("", "steps/s"), rates),
            Sheet("stalls", ("by", ""), stalls),
            Sheet("time of the learner", ("stage", "share"), stages),
            Sheet("sum of gradients, ms", ("values x learners", *names), rows),
        ],
        [Chart("time of the learner", "", "share", {"share": stages}, "bars")],
    )
