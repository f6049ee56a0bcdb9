"""A worker of `layout: async_gradient` that stands still: who goes on, what becomes of it.

    python benchmarks/paused_worker.py [--pause-s 20] [--json FILE]

Two parameter servers and three workers train on CartPole. One worker is stopped (SIGSTOP) and goes
on later; the rate of learner steps before and during the pause, the lag of gradients and the
gradients that were dropped are compared.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hpcrl.durable import atomic_write
from hpcrl.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SERVERS, WORKERS = 2, 3
STEADY_S = 10.0
_START_S = 120.0


def start(run_dir: Path, max_lag: int) -> subprocess.Popen[bytes]:
    """Start the job; it trains until it is asked to stop."""
    options = {
        "run.dir": run_dir,
        "topology.learners": SERVERS,
        "topology.actors": WORKERS,
        "learner.max_gradient_lag": max_lag,
        "metrics.every_s": 0.5,
        "metrics.tensorboard": "false",
        "checkpoint.every_s": 2,
        "stop.mean_return": "null",
        "stop.agent_steps": 10**10,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    config = ROOT / "configs" / "cartpole_a3c.yaml"
    return subprocess.Popen([sys.executable, "-m", "hpcrl", "train", str(config), *words])


def rank_process(job: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    """Return the process of one rank."""
    for process in psutil.Process(job.pid).children(recursive=True):
        environment = process.environ()
        if environment.get("OMPI_COMM_WORLD_RANK") == str(rank):
            return process
    raise RuntimeError(f"no process is rank {rank} of the job")


def steps_per_s(records: Sequence[dict[str, Any]], first_s: float, last_s: float) -> float:
    """Return learner steps per second between two Unix times."""
    inside = [r for r in records if first_s <= r["time_unix_s"] <= last_s]
    steps = inside[-1]["learner_steps"] - inside[0]["learner_steps"]
    return float(steps / (inside[-1]["time_unix_s"] - inside[0]["time_unix_s"]))


def measure(pause_s: float, max_lag: int) -> dict[str, Any]:
    """Run the job, stop a worker for `pause_s`, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-paused-") as folder:
        run_dir = Path(folder) / "run"
        job = start(run_dir, max_lag)
        try:
            end_s = time.monotonic() + _START_S
            while len(read_metrics(run_dir)) < 4 and time.monotonic() < end_s:
                time.sleep(0.2)
            worker = rank_process(job, SERVERS + WORKERS - 1)
            begun_s = time.time()
            time.sleep(STEADY_S)
            worker.send_signal(signal.SIGSTOP)
            stopped_s, before = time.time(), read_metrics(run_dir)[-1]["dropped_gradients"]
            time.sleep(pause_s)
            worker.send_signal(signal.SIGCONT)
            resumed_s = time.time()
            time.sleep(STEADY_S)
        finally:
            job.send_signal(signal.SIGTERM)
            code = job.wait(timeout=120)
        records = read_metrics(run_dir)
    known = [r for r in records if r.get("gradient_lag_max") is not None]
    return {
        "pause_s": pause_s,
        "servers": SERVERS,
        "workers": WORKERS,
        "max_gradient_lag": max_lag,
        "exit_code": code,
        "learner_steps_per_s": {
            "before": steps_per_s(records, begun_s, stopped_s),
            "during": steps_per_s(records, stopped_s, resumed_s),
            "after": steps_per_s(records, resumed_s, records[-1]["time_unix_s"]),
        },
        "gradient_lag": sum(r["gradient_lag"] for r in known) / len(known),
        "gradient_lag_max": max(r["gradient_lag_max"] for r in known),
        "dropped_before": before,
        "dropped_in_all": records[-1]["dropped_gradients"],
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause-s", type=float, default=20.0)
    parser.add_argument("--max-lag", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.pause_s, arguments.max_lag), indent=2) + "\n"
    print(text, end="")
    if arguments.json:
        atomic_write(arguments.json, text)


if __name__ == "__main__":
    main()
