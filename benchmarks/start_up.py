"""From launch to the first training step of a job of many ranks on this machine.

    python benchmarks/start_up.py --ranks 32 --json benchmarks/results/start_up.json

Claim: at most 20 s for 32 ranks. Most of it is processor time of imports, so with more ranks than
cores the machine's load counts twice: the processor time over the cores is reported, too, as is the
import of each role alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from hpcrl.run.metrics import read_metrics

GOAL_S = 20.0
ROOT = Path(__file__).resolve().parent.parent
IMPORTS = {
    "actor": "hpcrl.start.training, hpcrl.start.launch, hpcrl.roles.actor, hpcrl.comm.transport",
    "inference": "hpcrl.start.launch, hpcrl.roles.inference, hpcrl.comm.transport",
    "learner": "hpcrl.start.launch, hpcrl.roles.learner, hpcrl.comm.transport",
}


def cpu_s() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def training(ranks: int, unrolls: int) -> dict:
    """One learner, one inference rank, and actors; ends after a few steps."""
    return {
        "layout": "seed",
        "env": {"name": "synthetic:counting", "envs_per_actor": 4, "groups": 2},
        "topology": {"learners": 1, "inference": 1, "actors": ranks - 2},
        "network": {"torso": "mlp", "hidden_sizes": [32]},
        "learner": {"batch_unrolls": unrolls, "unroll_steps": 5},
        "stop": {"agent_steps": 4 * 5 * unrolls},
        "metrics": {"every_s": 0.1, "tensorboard": False},
        "checkpoint": {"every_s": 0},
    }


def start(ranks: int) -> dict[str, float]:
    """Seconds from the launch to the first record, which follows the first learner step."""
    with tempfile.TemporaryDirectory() as folder:
        config, run = Path(folder) / "start.yaml", Path(folder) / "run"
        config.write_text(yaml.safe_dump(training(ranks, 4 * (ranks - 2))), encoding="utf-8")
        command = [sys.executable, "-m", "hpcrl", "train", str(config), "--run.dir", str(run)]
        before_s, launched_s = cpu_s(), time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600, cwd=ROOT)
        whole_s = time.time() - launched_s
        first_s = read_metrics(run)[0]["time_unix_s"] - launched_s
        return {"first_step_s": first_s, "whole_run_s": whole_s, "cpu_s": cpu_s() - before_s}


def import_s(modules: str) -> float:
    """Processor seconds of a process that imports what a role imports."""
    times = []
    for _ in range(3):
        before_s = cpu_s()
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, cwd=ROOT)
        times.append(cpu_s() - before_s)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.ranks < 3:
        parser.error("a learner, an inference rank and an actor are three ranks")
    starts = [start(arguments.ranks) for _ in range(arguments.repeats)]
    first_s = statistics.median(one["first_step_s"] for one in starts)
    cores = len(os.sched_getaffinity(0))
    used_s = statistics.median(one["cpu_s"] for one in starts)
    results = {
        "ratio": first_s / GOAL_S,
        "ranks": arguments.ranks,
        "cores": cores,
        "load_average_1min": os.getloadavg()[0],
        "first_step_s": first_s,
        "cpu_s_over_cores": used_s / cores,
        "import_cpu_s": {role: import_s(modules) for role, modules in IMPORTS.items()},
        "starts": starts,
    }
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
