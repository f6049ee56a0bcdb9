"""An exception in each role of a Slurm job, at start, mid-run and shut-down: how soon is it over?

    python -m benchmarks.failures --json benchmarks/results/failures.json
    python -m benchmarks.failures --roles worker follower --json FILE   # keeps FILE's other roles

Claim: the whole job ends in under ten seconds, with a code that is not 0, the traceback is in its
output and in the rank's log, no process is left, and the last checkpoint is good.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.batch_training import BatchTraining
from hpcrl.run.checkpoint import list_checkpoints, load_latest
from hpcrl.run.heartbeat import read_beats
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir
from slurm.testcluster import TestCluster
from tests.breaking_job import BREAK, WORDS, broken_at
from tests.job_runner import status_of
from tests.small import merged

PHASES = ("start-up", "mid-run", "shut-down")
SEED = {
    "layout": "seed",
    "topology": {"learners": 1, "inference": 1, "actors": 2, "evaluators": 1},
    "evaluation": {"episodes": 2, "envs": 2, "every_s": 0.5},
}
IMPALA = {"layout": "impala", "topology": {"learners": 1, "inference": 0, "actors": 2}}
TEAMS = {
    "layout": "seed",
    "topology": {"learners": 1, "inference": 1, "actors": 1},
    "env": {"name": "tests.shared_env:make", "ranks_per_env": 2},
}
ASYNC = {
    "layout": "async_gradient",
    "agent": {"name": "a3c"},
    "topology": {"learners": 2, "inference": 0, "actors": 2},
}
ROLES = {
    "learner": ("learner", SEED),
    "inference": ("inference", SEED),
    "actor": ("actor", SEED),
    "evaluator": ("evaluator", SEED),
    "worker": ("worker", IMPALA),
    "follower": ("follower", TEAMS),
    "parameter server": ("learner", ASYNC),
    "gradient worker": ("worker", ASYNC),
}
"""What the topology calls each role, and a configuration with ranks of it."""


def configuration(role: str, run_dir: Path) -> dict:
    """A job that would train for ever."""
    return merged(
        {
            "run": {"dir": str(run_dir)},
            "env": {
                "name": "synthetic:counting",
                "options": {},
                "envs_per_actor": 4,
                "groups": 2,
            },
            "network": {"hidden_sizes": [8]},
            "learner": {"batch_unrolls": 4, "unroll_steps": 5, "backend": "mpi"},
            "stop": {"agent_steps": 10**9},
            "metrics": {"every_s": 0.5, "tensorboard": False},
            "checkpoint": {"every_s": 1.0},
            "transport": {"deadline_s": 120.0},
        },
        ROLES[role][1],
    )


def break_job(cluster: TestCluster, folder: Path, role: str, phase: str) -> dict:
    """Run a job, break it, and tell what was seen."""
    run_dir, config, name = folder / "run", folder / "job.yaml", ROLES[role][0]
    config.write_text(yaml.safe_dump(configuration(role, run_dir)))
    overrides = ("--stop.agent_steps", 2000) if phase == "shut-down" else ()
    environment = {"BREAK_AT": f"{name}/{phase}"}
    with BatchTraining(
        cluster, config, *overrides, program="tests.breaking_job", env=environment
    ) as job:
        if phase == "mid-run":
            job.wait_until(lambda: list_checkpoints(run_dir), "checkpoint", timeout_s=180.0)
            job.wait_until(lambda: read_metrics(run_dir), "metrics")
            (victim,) = [beat for beat in read_beats(run_dir) if beat.name == f"{name} 0"]
            os.kill(victim.pid, BREAK)
        code = job.process.wait(timeout=300.0)
        over_s = time.time()
        left = len(job.processes())
        output = job.output
    logs = "".join(path.read_text() for path in (RunDir(run_dir).logs).glob("rank-*.log"))
    return {
        "role": role,
        "phase": phase,
        "over_in_s": round(over_s - broken_at(output), 2),
        "code": code,
        "traceback": f"RuntimeError: {WORDS}" in output and "Traceback" in output,
        "logged": f"RuntimeError: {WORDS}" in logs,
        "state": status_of(run_dir).get("state"),
        "verdict_names_it": WORDS in str(status_of(run_dir).get("verdict")),
        "processes_left": left,
        "checkpoint": load_latest(run_dir).step if list_checkpoints(run_dir) else None,
    }


def holds(row: dict) -> bool:
    """Whether a row is as claimed, but for the time."""
    return (
        row["code"] not in (0, 75)
        and row["traceback"]
        and row["logged"]
        and row["verdict_names_it"]
        and row["state"] == "failed"
        and (row["phase"] == "start-up" or row["checkpoint"] is not None)
    )


def kept(path: Path | None, roles: list[str]) -> list[dict]:
    """Return the earlier rows of all other roles."""
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["role"] not in roles]


def figures(rows: list[dict]) -> dict:
    """Return all rows in order, and what they come to."""
    order = [(role, phase) for role in ROLES for phase in PHASES]
    rows = sorted(rows, key=lambda row: order.index((row["role"], row["phase"])))
    return {
        "rows": rows,
        "slowest_s": max(row["over_in_s"] for row in rows),
        "ok": all(map(holds, rows)),
        "complete": [(row["role"], row["phase"]) for row in rows] == order,
    }


def main() -> int:
    """Break all, and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roles", nargs="*", default=list(ROLES), choices=list(ROLES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = kept(arguments.json, arguments.roles)
    with TestCluster(num_nodes=1, cpus=8) as cluster:
        for role, phase in itertools.product(arguments.roles, PHASES):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(break_job(cluster, Path(folder), role, phase))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(figures(rows), indent=2) + "\n")
    seen = figures(rows)
    print(json.dumps({key: value for key, value in seen.items() if key != "rows"}))
    return 0 if seen["ok"] and seen["slowest_s"] < 10.0 else 1


if __name__ == "__main__":
    sys.exit(main())
