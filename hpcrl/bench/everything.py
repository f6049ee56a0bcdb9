"""`hpcrl bench all`: every benchmark, one after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcrl.bench import checkpoint, inference, learner, project, scale, scripts, system, wire
from hpcrl.bench.ranks import HOME, BenchError
from hpcrl.bench.result import Chart, Result, Sheet, publish
from hpcrl.bench.simulator import Network

Benchmarks = Mapping[str, Callable[[], Result]]

_NODE = project.Machine(32, 32, 0, Network(), {})


def quick_benchmarks() -> Benchmarks:
    """Every benchmark as short as it can be: what they give is no measurement."""
    path = str(HOME / "configs" / "counting.yaml")
    few = ["--env.envs_per_actor", "4"]
    return {
        "system": lambda: system.bench_system(path, few, 3.0, 1.0, 0.2),
        "wire": lambda: wire.bench_wire([1], 0.05, 1, "auto", True),
        "inference": lambda: inference.bench_inference(path, few, 1, 1.0),
        "learner": lambda: learner.bench_learner(path, few, 2.0, 2, 2),
        "checkpoint": lambda: checkpoint.bench_checkpoint(path, few, 2.0),
        "replay": lambda: scripts.bench_replay(True),
        "recording": lambda: scripts.bench_recording(True, 0),
        "scale": lambda: scale.bench_scale([1, 2], 0.02, 2, 3.0, ["auto"], ["sleep"]),
        "project": lambda: project.bench_project(path, few, [1, 10], _NODE, None, 0.2),
        "project-check": lambda: project.bench_check(path, few, [1], 6.0, 1.0, 0.2),
    }


def benchmarks() -> Benchmarks:
    """Every benchmark at the length that its claims were measured with; most of an hour."""
    path = str(HOME / "configs" / "breakout_vtrace.yaml")
    return {
        "system": lambda: system.bench_system(path, [], 60.0, 15.0),
        "wire": lambda: wire.bench_wire([1, 4, 16], 0.5, 5, "auto", False),
        "inference": lambda: inference.bench_inference(path, [], 4, 10.0),
        "learner": lambda: learner.bench_learner(path, [], 20.0, 2, 50),
        "checkpoint": lambda: checkpoint.bench_checkpoint(path, [], 30.0),
        "replay": lambda: scripts.bench_replay(False),
        "recording": lambda: scripts.bench_recording(False, 3),
        "scale": lambda: scale.bench_scale([4, 64, 256], 0.02, 8, 20.0, ["auto"], ["sleep"]),
        "project": lambda: project.bench_project(path, [], [1, 10, 100, 1000], _NODE, None),
        "project-check": lambda: project.bench_check(path, [], [1, 2, 4, 8], 20.0, 8.0),
    }


def bench_all(chosen: Benchmarks, folder: Path | None) -> Result:
    """Run the benchmarks; one that fails doesn't keep the others from running.

    Args:
      chosen: by name.
      folder: gets NAME.json and NAME.png of each; None: nothing is written.

    Raises:
      BenchError: one or more failed; names them.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, float, float, str]] = []
    failed = []
    for name, run in chosen.items():
        print(f"bench {name}", flush=True)
        start_s = time.monotonic()
        try:
            result = run()
        except BenchError as error:
            print(f"hpcrl: bench {name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        if folder is None:
            publish(result)
        else:
            publish(result, str(folder / f"{name}.json"), str(folder / f"{name}.png"))
        rows.append((name, result.ratio, time.monotonic() - start_s, result.meaning))
    if failed:
        raise BenchError(f"{len(failed)} of {len(chosen)} benchmarks failed: {', '.join(failed)}")
    return Result(
        "all",
        len(rows) / len(chosen),
        "benchmarks that ran to their end",
        {
            "benchmarks": {
                name: {"ratio": ratio, "seconds": seconds, "meaning": meaning}
                for name, ratio, seconds, meaning in rows
            }
        },
        [Sheet("all benchmarks", ("benchmark", "ratio", "took, s", "meaning"), rows)],
        [
            Chart(
                "headlines",
                "",
                "ratio",
                {"ratio": [(name, ratio) for name, ratio, _, _ in rows]},
                "bars",
                goal=1.0,
            )
        ],
    )
