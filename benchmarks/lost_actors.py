"""Five of eight actors of a Slurm job are killed under ULFM: do three keep their share of the rate?

    python -m benchmarks.lost_actors --json benchmarks/results/lost_actors.json

Claim: the rate of environment steps of those that are left is within 10 % of their share of the
rate before, and the same run reaches its goal with code 0. The environments sleep, so that the
cores are not what bounds the rate. `slurm/train_mpirun.sbatch` starts the job.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.batch_training import BatchTraining
from hpcrl.run.heartbeat import read_beats
from hpcrl.run.metrics import read_metrics
from slurm.testcluster import TestCluster
from tests.job_runner import status_of

ACTORS, KILLED = 8, 5
SETTLE_S = 5.0


def configuration(run_dir: Path, seconds: float) -> dict:
    """Eight actors of environments that take 10 ms per step; the goal comes after both rates."""
    return {
        "layout": "seed",
        "run": {"dir": str(run_dir), "fault_tolerance": "ulfm"},
        "env": {
            "name": "synthetic:counting",
            "options": {"episode_length": 50, "step_time_s": 0.01},
            "envs_per_actor": 4,
            "groups": 2,
        },
        "topology": {"learners": 1, "inference": 1, "actors": ACTORS},
        "network": {"torso": "mlp", "hidden_sizes": [32]},
        "learner": {"batch_unrolls": 8, "unroll_steps": 10, "backend": "mpi"},
        "inference": {"max_batch_rows": 2},
        "stop": {"agent_steps": int(100 * (ACTORS + ACTORS - KILLED) * (seconds + 30.0))},
        "metrics": {"every_s": 1.0, "tensorboard": False},
        "checkpoint": {"every_s": 0},
        "transport": {"deadline_s": 120.0},
    }


def rate(run_dir: Path, seconds: float) -> float:
    """Environment steps per second from now on, by the records of metrics.jsonl."""
    time.sleep(SETTLE_S)
    begun_s = time.time()
    time.sleep(seconds)
    records = [r for r in read_metrics(run_dir) if r["time_unix_s"] >= begun_s]
    steps = records[-1]["agent_steps"] - records[0]["agent_steps"]
    return steps / (records[-1]["wall_time_s"] - records[0]["wall_time_s"])


def main() -> int:
    """Measure, kill, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir, config = Path(folder) / "run", Path(folder) / "job.yaml"
        config.write_text(yaml.safe_dump(configuration(run_dir, arguments.seconds)))
        with (
            TestCluster(num_nodes=1, cpus=ACTORS + 2) as cluster,
            BatchTraining(cluster, config, script="train_mpirun.sbatch") as job,
        ):
            job.wait_until(lambda: read_metrics(run_dir), "metrics", timeout_s=180.0)
            before = rate(run_dir, arguments.seconds)
            for index in range(KILLED):
                (victim,) = [b for b in read_beats(run_dir) if b.name == f"actor {index}"]
                os.kill(victim.pid, signal.SIGKILL)
                job.wait_until(
                    lambda: read_metrics(run_dir)[-1]["lost_actors"] == index + 1,  # noqa: B023
                    "loss",
                )
            after = rate(run_dir, arguments.seconds)
            code = job.process.wait(timeout=900.0)
        status = status_of(run_dir)
    share = before * (ACTORS - KILLED) / ACTORS
    figures = {
        "steps_per_s_of_eight": round(before, 1),
        "share_of_three": round(share, 1),
        "steps_per_s_of_three": round(after, 1),
        "ratio": round(after / share, 3),
        "code_at_the_goal": code,
        "lost_actors": status["lost_actors"],
        "verdict": status["verdict"],
    }
    figures["ok"] = abs(figures["ratio"] - 1) <= 0.1 and code == 0
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
