"""The layouts on one task with equal networks, environments and cores, and how they compare.

    python benchmarks/layouts.py [--seconds 60] [--only sync impala] [--json FILE]

CartPole, two hidden layers of 64, two acting ranks with 16 environments each, one learner, and an
inference rank where it acts. Each layout learns with the settings of its configs/cartpole_*.yaml. A
FILE that holds results of other layouts is added to, so that they can be taken one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.load import load_config, to_dict
from hpcrl.durable import atomic_write
from hpcrl.run.advise import steady_means
from hpcrl.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {
    "sync": "cartpole_ppo",
    "async_gradient": "cartpole_a3c",
    "impala": "cartpole_impala",
    "seed": "cartpole_vtrace",
    "replay": "cartpole_apex",
}
"""Configuration of each layout."""

EQUAL = {
    "env.envs_per_actor": 16,
    "env.groups": 2,
    "topology.learners": 1,
    "topology.actors": 2,
    "network.hidden_sizes": "[64, 64]",
    "network.activation": "tanh",
    "metrics.every_s": 1,
    "metrics.tensorboard": "false",
    "checkpoint.every_s": 0,
    "stop.frames": 0,
    "stop.agent_steps": 0,
    "stop.mean_return": "null",
}
OWN: dict[str, dict[str, Any]] = {
    # One unroll of each of 32 environments, as long as gives the batch of the file.
    "sync": {"learner.batch_unrolls": 32, "learner.unroll_steps": 64, "topology.inference": 1},
    "async_gradient": {"learner.batch_unrolls": 16},
    "seed": {"topology.inference": 1},
    "replay": {"agent.head_size": 64, "topology.inference": 1},
}
"""What makes a file's settings fit, by layout."""

Curve = Sequence[Sequence[float]]


def overrides(layout: str, run_dir: Path, seconds: float) -> list[str]:
    """Return the options of `hpcrl train`."""
    options = {
        **EQUAL,
        **OWN.get(layout, {}),
        "run.dir": run_dir,
        "stop.wall_time_s": seconds,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def measure(layout: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Train one layout; return its figures and its curve (seconds, agent steps, return).

    Raises:
      CalledProcessError: the run failed.
    """
    path, run_dir = str(ROOT / "configs" / f"{CONFIGS[layout]}.yaml"), folder / layout
    options = overrides(layout, run_dir, seconds)
    learner = to_dict(load_config(path, options))["learner"]
    subprocess.run(
        [sys.executable, "-m", "hpcrl", "train", path, *options],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=seconds + 120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    records = read_metrics(run_dir)
    means = steady_means(records)
    held = [f"inference_{stage}_share" for stage in ("wait", "held", "blocked")]
    held.append("worker_exchange_share")  # of workers that compute gradients
    central = "actor_wait_share" in means and means["actor_wait_share"] > 0
    steps = 1 if layout == "replay" else learner["unroll_steps"]
    return {
        "seconds": seconds,
        "env_steps_per_s": means["env_steps_per_s"],
        "learned_steps_per_s": records[-1]["agent_steps"] / records[-1]["wall_time_s"],
        "policy_lag": means.get("policy_lag"),
        "policy_lag_max": max((r.get("policy_lag_max") or 0 for r in records), default=None),
        "batch_steps": learner["batch_unrolls"] * steps,
        "batch_rows": means["batch_rows"],
        "learner_idle_share": means["learner_wait_share"],
        "actor_idle_share": means["actor_wait_share"]
        if central
        else sum(means.get(name, 0.0) for name in held),
        "load": os.getloadavg()[0],
        "curve": [
            [round(r["wall_time_s"], 2), r["agent_steps"], r["mean_return_100"]]
            for r in records
            if r.get("mean_return_100") is not None
        ],
    }


def return_at(curve: Curve, column: int, value: float) -> float | None:
    """Return the mean return of the last point whose `column` is not beyond `value`."""
    points = [point for point in curve if point[column] <= value]
    return points[-1][2] if points else None


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the comparison as a Markdown table; equal frames are those that all have reached."""
    order = [layout for layout in CONFIGS if layout in results]
    steps = min(results[layout]["curve"][-1][1] for layout in order)
    seconds = min(results[layout]["seconds"] for layout in order)
    head = [
        *("layout", "steps/s", "lag mean", "lag most", "batch, steps", "batch, rows"),
        *("learner idle", "actor idle", f"return at {steps:,} steps", f"return at {seconds:g} s"),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for layout in order:
        r = results[layout]
        lag = "-" if layout == "replay" else f"{r['policy_lag']:.1f} | {r['policy_lag_max']:.0f}"
        cells = [
            *(f"`{layout}`", f"{r['env_steps_per_s']:,.0f}", "- | -" if lag == "-" else lag),
            *(f"{r['batch_steps']:,}", f"{r['batch_rows']:.1f}"),
            *(f"{r['learner_idle_share']:.0%}", f"{r['actor_idle_share']:.0%}"),
            *(_score(return_at(r["curve"], 1, steps)), _score(return_at(r["curve"], 0, seconds))),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def main() -> int:
    """Measure the chosen layouts; print the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    there = [name for name, c in CONFIGS.items() if (ROOT / "configs" / f"{c}.yaml").exists()]
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=there, nargs="*", default=there)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    path, results = arguments.json, {}
    if path and path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for layout in arguments.only:
            results[layout] = measure(layout, Path(folder), arguments.seconds)
            print(f"{layout}: {results[layout]['env_steps_per_s']:,.0f} steps/s", flush=True)
            if path:
                atomic_write(path, json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
