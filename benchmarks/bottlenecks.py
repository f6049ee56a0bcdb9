"""Four runs, each made to be held up by another side, and what `hpcrl advise` says of them.

    python benchmarks/bottlenecks.py [--seconds 15] [--only learner] [--json FILE]

The environments are synthetic: what they cost is set here, and nothing is learned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from hpcrl.run.advise import advice_lines, advise, read_shape, steady_means
from hpcrl.run.metrics import read_metrics

BASE: dict[str, Any] = {
    "layout": "seed",
    "env": {"name": "synthetic:counting", "envs_per_actor": 4, "groups": 2},
    "topology": {"learners": 1, "inference": 1, "actors": 2},
    "learner": {"batch_unrolls": 8, "unroll_steps": 20, "threads": 1},
    "inference": {"threads": 1},
    "metrics": {"every_s": 1, "tensorboard": False},
    "checkpoint": {"every_s": 0},
}

RUNS: dict[str, dict[str, Any]] = {
    # Every step sleeps: nobody else has anything to do.
    "environments": {
        "env": {"options": {"step_time_s": 0.004, "episode_length": 50}},
        "network": {"hidden_sizes": [32]},
    },
    # A wide network for one row at a time, which costs as much as many rows would.
    "inference": {
        "env": {
            "envs_per_actor": 1,
            "groups": 1,
            "options": {"episode_length": 50, "observation_shape": [256]},
        },
        "network": {"hidden_sizes": [1024, 1024, 1024]},
    },
    # The same rows in large batches for acting, and a recurrent network that learns in many steps.
    "learner": {
        "env": {"envs_per_actor": 32, "options": {"episode_length": 50}},
        "network": {"hidden_sizes": [256], "core": "lstm", "core_size": 256},
        "learner": {"batch_unrolls": 32},
    },
    # A quarter of a megabyte a row, and next to nothing to compute of it.
    "network": {
        "env": {
            "options": {
                "episode_length": 50,
                "observation_shape": [65536],
                "observation_dtype": "float32",
            }
        },
        "network": {"hidden_sizes": [1]},
    },
}
"""What each run differs in, by the side that holds it up."""


def config_of(side: str, run_dir: Path, seconds: float) -> dict[str, Any]:
    """Return the configuration of a run, as plain data."""
    own = RUNS[side]
    sections: dict[str, Any] = {**BASE, "run": {"dir": str(run_dir)}}
    for name, values in own.items():
        sections[name] = {**sections.get(name, {}), **values}
    return {**sections, "stop": {"wall_time_s": seconds}}


def run(side: str, folder: Path, seconds: float) -> Path:
    """Train as a user does; return the run directory.

    Raises:
      CalledProcessError: the run failed.
    """
    run_dir, config = folder / side, folder / f"{side}.yaml"
    config.write_text(yaml.safe_dump(config_of(side, run_dir, seconds)), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "hpcrl", "train", str(config)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=seconds + 120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return run_dir


def main() -> int:
    """Run the chosen sides; 0 when each was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", choices=tuple(RUNS), nargs="*", default=list(RUNS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in arguments.only:
            run_dir = run(side, Path(folder), arguments.seconds)
            means = steady_means(read_metrics(run_dir))
            named = advise(means, read_shape(run_dir)).bottleneck
            shares = {name: round(v, 3) for name, v in sorted(means.items()) if "_share" in name}
            results[side] = {"named": named, "shares": shares}
            print(f"{side}: {'named' if named == side else f'NOT named, but {named}'}")
            print("\n".join(f"  {line}" for line in advice_lines(run_dir)), flush=True)
            print("  " + ", ".join(f"{n} {v:g}" for n, v in shares.items() if v > 0.02), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(side == result["named"] for side, result in results.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
