"""Environments that raise, give garbage, hang and crash, each about once a minute, in a Slurm job.

    python -m benchmarks.mixed_failures --minutes 4 --json benchmarks/results/mixed_failures.json

Claim: the run reaches its goal, every failure is counted under its name, and no zombie and no
process is left, during the run or after it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.batch_training import BatchTraining
from benchmarks.failing_envs import failures_in
from benchmarks.rank_samples import RankSamples
from hpcrl.run.heartbeat import read_beats
from hpcrl.run.metrics import read_metrics
from slurm.testcluster import TestCluster
from tests.job_runner import status_of

ENVS, KINDS = 8, 4
LOOK_S = 2.0


def configuration(run_dir: Path, log: Path, goal: int) -> dict:
    """Two actors; the kinds of failures are drawn anew in each life of an environment."""
    options = {"log": str(log), "mean_s": 60.0 * ENVS / KINDS, "step_time_s": 0.02}
    return {
        "layout": "seed",
        "run": {"dir": str(run_dir)},
        "env": {
            "name": "benchmarks.failing_envs:make",
            "options": options,
            "envs_per_actor": ENVS // 2,
            "groups": 4,
            "isolation": "process",
            "step_timeout_s": 3.0,
            "start_timeout_s": 60.0,
            "max_restarts_per_hour": 1000,
        },
        "topology": {"learners": 1, "inference": 1, "actors": 2},
        "network": {"torso": "mlp", "hidden_sizes": [32]},
        "learner": {"batch_unrolls": 8, "unroll_steps": 10, "backend": "mpi"},
        "stop": {"agent_steps": goal},
        "metrics": {"every_s": 1.0, "tensorboard": False},
        "transport": {"deadline_s": 120.0},
    }


def main() -> int:
    """Run, and compare the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    goal = int(arguments.minutes * 60 * 100)  # two actors step 50 times a second each
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "failures"
        config = Path(folder) / "job.yaml"
        config.write_text(yaml.safe_dump(configuration(run_dir, log, goal)))
        samples = RankSamples(warm_up_s=0.0, shortest_s=0.0)
        with (
            TestCluster(num_nodes=1, cpus=4) as cluster,
            BatchTraining(cluster, config) as job,
        ):
            while (code := job.process.poll()) is None:
                samples.look(read_beats(run_dir))
                time.sleep(LOOK_S)
            time.sleep(5.0)
            left = len(job.processes())
        status, broke = status_of(run_dir), failures_in(log)
        seconds = read_metrics(run_dir)[-1]["wall_time_s"]
    figures = {
        "code": code,
        "verdict": status["verdict"],
        "seconds": round(seconds),
        "failures": broke,
        "per_minute": {kind: round(60 * n / seconds, 2) for kind, n in broke.items()},
        "counted": status["env_restarts"],
        "lasting_zombies": max(row["lasting_zombies"] for row in samples.growth()),
        "processes_left": left,
    }
    figures["ok"] = (
        code == 0
        and figures["counted"] == broke
        and all(broke.values())
        and figures["lasting_zombies"] == 0
        and left == 0
    )
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
