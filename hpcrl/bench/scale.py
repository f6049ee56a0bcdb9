"""`hpcrl bench scale`: environment steps per second of more and more actor ranks here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpcrl.bench.ranks import BenchError, end_family
from hpcrl.bench.result import Chart, Result, Sheet
from hpcrl.run.metrics import read_metrics

GOAL, START_GOAL_S = 0.95, 20.0

_START_S = 90.0
_START_PER_RANK_S = 3.0


class Case(NamedTuple):
    """One training run.

    Attributes:
      ranks: actors.
      wait: waiting policy.
      mode: whether an environment's step sleeps or computes.
    """

    ranks: int
    wait: str
    mode: str


def training(case: Case, step_time_s: float, envs: int, seconds: float) -> dict[str, Any]:
    """Return a configuration's data: the synthetic environment and a small network."""
    groups = 2 if envs % 2 == 0 else 1
    return {
        "layout": "seed",
        "env": {
            "name": "synthetic:counting",
            "options": {
                "episode_length": 200,
                "step_time_s": step_time_s,
                "step_time_mode": case.mode,
            },
            "envs_per_actor": envs,
            "groups": groups,
        },
        "topology": {"learners": 1, "inference": 1, "actors": case.ranks},
        "network": {"torso": "mlp", "hidden_sizes": [32]},
        # The learner of one actor and that of many step a few times a second.
        "learner": {"batch_unrolls": max(4, case.ranks), "unroll_steps": 5},
        "transport": {"wait": case.wait},
        "stop": {"wall_time_s": seconds},
        "metrics": {"every_s": 1.0, "tensorboard": False},
        "checkpoint": {"every_s": 0},
    }


def run_case(
    case: Case, step_time_s: float, envs: int, seconds: float, warm_up_s: float
) -> dict[str, Any]:
    """Train; return the steady rate and how long the start took.

    Raises:
      BenchError: training failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        config, run = Path(folder) / "scale.yaml", Path(folder) / "run"
        data = training(case, step_time_s, envs, warm_up_s + seconds)
        config.write_text(yaml.safe_dump(data), encoding="utf-8")
        command = [sys.executable, "-m", "hpcrl", "train", str(config), "--run.dir", str(run)]
        launched_s = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        limit_s = warm_up_s + seconds + _START_S + _START_PER_RANK_S * case.ranks
        try:
            code = process.wait(limit_s)
        except BaseException as error:
            end_family(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BenchError(f"{case.ranks} actors took over {limit_s:.0f} s") from None
            raise
        if code != 0:
            raise BenchError(f"training with {case.ranks} actors ended with code {code}")
        return rates(case, read_metrics(run), launched_s, warm_up_s)


def rates(
    case: Case, records: Sequence[dict[str, Any]], launched_s: float, warm_up_s: float
) -> dict[str, Any]:
    """Return a case's figures from its metrics.

    The first record follows the first learner step, so the start is bounded from above.
    """
    steady = [r for r in records if r["wall_time_s"] >= warm_up_s]
    if not steady:
        raise BenchError(f"{case.ranks} actors: no record of metrics after the warm-up")
    steps = [r["env_steps_per_s"] for r in steady]
    rate = sum(steps) / len(steps)
    return {
        **case._asdict(),
        "env_steps_per_s": rate,
        "batch_rows": sum(r["batch_rows"] for r in steady) / len(steady),
        "row_wait_ms": sum(r["row_wait_ms"] for r in steady) / len(steady),
        "policy_lag": sum(r["policy_lag"] for r in steady) / len(steady),
        "first_step_s": records[0]["time_unix_s"] - launched_s,
    }


def bench_scale(
    ranks: Sequence[int],
    step_time_s: float,
    envs: int,
    seconds: float,
    waits: Sequence[str],
    modes: Sequence[str],
) -> Result:
    """Train with every number of actors, waiting policy and kind of environment.

    Args:
      ranks: numbers of actors.
      step_time_s: of one environment.
      envs: environments of an actor, in two groups where that can be.
      seconds: of steady training.
      waits: waiting policies.
      modes: sleep, compute or both.
    """
    cases = []
    for mode in modes:
        for wait in waits:
            for count in sorted(set(ranks)):
                # More ranks need longer until every queue has its usual length.
                warm_up_s = min(10.0, max(seconds / 2, 2 * step_time_s * envs))
                case = Case(count, wait, mode)
                cases.append(run_case(case, step_time_s, envs, seconds, warm_up_s))
    return summarise(cases, step_time_s, envs)


def summarise(cases: Sequence[dict[str, Any]], step_time_s: float, envs: int) -> Result:
    """Return the result; its headline is the first kind and policy at the most ranks."""
    curves: dict[str, list[tuple[int, float]]] = {}
    rows = []
    for case in cases:
        name = f"{case['mode']}, {case['wait']}"
        fewest = next(c for c in cases if (c["mode"], c["wait"]) == (case["mode"], case["wait"]))
        linear = fewest["env_steps_per_s"] / fewest["ranks"] * case["ranks"]
        if case["mode"] == "compute":
            # Cores, not ranks, are what there is more or less of.
            linear = min(linear, len(os.sched_getaffinity(0)) / step_time_s)
        efficiency = case["env_steps_per_s"] / linear
        curves.setdefault(name, []).append((case["ranks"], efficiency))
        rows.append(
            (
                f"{case['ranks']}, {name}",
                case["env_steps_per_s"],
                efficiency,
                case["batch_rows"],
                case["policy_lag"],
                case["first_step_s"],
            )
        )
    headline = next(iter(curves.values()))[-1]
    columns = ("actors", "steps/s", "of linear", "batch rows", "lag", "first step after, s")
    return Result(
        "scale",
        headline[1],
        f"{headline[0]} actor ranks of linear from the fewest (goal >= {GOAL})",
        {
            "efficiency_at_max": headline[1],
            "ranks_at_max": headline[0],
            "step_time_s": step_time_s,
            "envs_per_actor": envs,
            "cases": list(cases),
            "efficiency": {name: dict(points) for name, points in curves.items()},
        },
        [Sheet(f"environments of {1e3 * step_time_s:g} ms, {envs} an actor", columns, rows)],
        [Chart("scaling efficiency", "actor ranks", "of linear", curves, log_x=True, goal=GOAL)],
    )
