"""Real Slurm jobs on a private cluster: wall limits, signals and dead learners.

    python -m benchmarks.slurm_life goal wall signals kills --json FILE

goal     CartPole to a mean return of 475, started by srun, and by mpirun inside a job
wall     a wall limit of one minute and training of several: requeued until it is done, and then as
         a run that was never interrupted in counters and schedule
signals  `scancel -s USR2` at twenty random times: resumed each time from a whole checkpoint
kills    SIGKILL of the learner at twenty random times, five of them while it writes a checkpoint
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.kill_and_resume import outcome
from hpcrl.run.checkpoint import list_checkpoints, load_latest
from hpcrl.run.heartbeat import read_beats
from slurm.testcluster import TestCluster
from tests.slurm.batch_job import SITE, WHEEL_SITE, BatchJob

SHAPE = ("--nodes=1", "--ntasks-per-node=4")
# Environments that sleep, so that it is known how long the run takes; a network whose checkpoint
# takes long enough to be hit.
SLOW = ("--env.options", "{episode_length: 50, step_time_s: 0.001}")
LARGE = ("--network.hidden_sizes", "[1024, 1024]", "--checkpoint.every_s", "1")
STEP = 320


def train(cluster, folder: Path, *options, sbatch=(), **environment) -> BatchJob:
    """Submit a job; more than enough restarts are allowed."""
    folder.mkdir(parents=True)
    return BatchJob(
        *(cluster, folder, "train.sbatch", "counting.yaml", *SLOW, *options),
        sbatch=(*SHAPE, *sbatch),
        HPCRL_MAX_RESTARTS=1000,
        HPCRL_MAX_FRUITLESS=1000,  # some are stopped before their first step
        **environment,
    )


def state_of(job: BatchJob) -> str:
    """Slurm's word for the job."""
    return str(job.fields["JobState"])


def over(job: BatchJob) -> bool:
    """Whether the job has ended for good."""
    return state_of(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def requeue_now(job: BatchJob) -> None:
    """Shorten the two minutes that Slurm waits before it starts a requeued job again."""
    if job.cluster.run("squeue", "-h", "-j", job.id, "-o", "%T").strip() == "PENDING":
        time.sleep(2.0)
        job.cluster.run("scontrol", "update", f"jobid={job.id}", "StartTime=now", check=False)


def goal(cluster, folder: Path, rng: random.Random) -> dict:
    """Train to the end, as a user does who submits either script."""
    seen: dict = {}
    for launcher, script, site in (
        ("srun", "train.sbatch", SITE),
        ("mpirun", "train_mpirun.sbatch", WHEEL_SITE),
    ):
        (folder / launcher).mkdir(parents=True)
        job = BatchJob(
            *(cluster, folder / launcher, script, "cartpole_vtrace.yaml"),
            sbatch=SHAPE,
            HPCRL_SITE=str(site),
        )
        code = job.finish(timeout_s=900.0)
        seen[launcher] = {
            "exit_code": code,
            "slurm_state": state_of(job),
            "mean_return_100": job.status.get("mean_return_100"),
            "agent_steps": job.status["counters"]["agent_steps"],
        }
    seen["ok"] = all(
        seen[launcher]["exit_code"] == 0 and seen[launcher]["mean_return_100"] >= 475
        for launcher in ("srun", "mpirun")
    )
    return seen


def wall(cluster, folder: Path, rng: random.Random) -> dict:
    """The wall limit is one minute."""
    steps = ("--stop.agent_steps", 600 * STEP)
    lead = ("--run.deadline_lead_s", 15)
    limit = ("--time=1", "--signal=USR2@5")
    broken = train(cluster, folder / "broken", *steps, *lead, sbatch=limit)
    end_s = time.monotonic() + 900.0
    while not over(broken) and time.monotonic() < end_s:
        requeue_now(broken)
        time.sleep(1.0)
    unbroken = train(cluster, folder / "unbroken", *steps)
    unbroken.finish(timeout_s=600.0)
    records = broken.metrics
    seen = {
        "requeues": int(broken.fields["Restarts"]),
        "state": broken.status.get("state"),
        "slurm_state": state_of(broken),
        "starts_in_metrics": sorted({record["restart"] for record in records}),
        "wall_time_s": round(records[-1]["wall_time_s"], 1),
        "broken": outcome(broken.run),
        "unbroken": outcome(unbroken.run),
        "stopped_because": stops(broken),
    }
    seen["ok"] = (
        seen["state"] == "done" and seen["requeues"] >= 2 and seen["broken"] == seen["unbroken"]
    )
    return seen


def stops(job: BatchJob) -> list[str]:
    """Why each launch ended, by the batch script's own notes."""
    lines = (job.run / "attempts.jsonl").read_text().splitlines()
    return [json.loads(line)["reason"] for line in lines]


def wait_for_training(job: BatchJob, restart: int) -> bool:
    """Wait until a start trains; False when the job is over."""
    while not (job.status.get("state") == "running" and job.status["restart"] == restart):
        if over(job):
            return False
        requeue_now(job)
        time.sleep(0.2)
    return True


def disturb(cluster, folder: Path, count: int, act, options: tuple = ()) -> tuple[list, BatchJob]:
    """Let `act` end a job's starts, one after the other."""
    job = train(cluster, folder, "--stop.agent_steps", 10**9, *LARGE, *options)
    events = []
    for restart in range(count):
        if not wait_for_training(job, restart):
            break
        event = act(job, restart)
        while job.status.get("state") == "running" and job.status["restart"] == restart:
            time.sleep(0.1)
        events.append(event)
        print(json.dumps(event), flush=True)
    return events, job


def judge(events: list, job: BatchJob, count: int) -> dict:
    """Resume once more, and look at what is there."""
    resumed = wait_for_training(job, count)
    cluster = job.cluster
    cluster.run("scancel", job.id)
    job.wait_until(lambda: over(job), "end")
    steps = [record["learner_steps"] for record in job.metrics]
    resumed_from = [event["checkpoint"] for event in events]
    return {
        "events": events,
        "resumed_after_the_last": resumed,
        "newest_checkpoint_is_good": load_latest(job.run).step == list_checkpoints(job.run)[0][0],
        "damaged_checkpoints": len(list((job.run / "checkpoints").glob("aside-*"))),
        "metrics_increase": steps == sorted(set(steps)),
        "counters_exact": all(r["agent_steps"] == STEP * r["learner_steps"] for r in job.metrics),
        "ok": len(events) == count and resumed and resumed_from == sorted(resumed_from),
    }


def signals(cluster, folder: Path, rng: random.Random) -> dict:
    """Twenty times `scancel -s USR2`."""

    def act(job, restart):
        time.sleep(rng.uniform(0.0, 4.0))
        cluster.run("scancel", "-s", "USR2", job.id)
        job.wait_until(
            lambda: job.status.get("state") == "requeue" or over(job), "stop", timeout_s=120.0
        )
        good = load_latest(job.run)
        same = good.step == job.status["counters"]["learner_steps"]
        return {"restart": restart, "checkpoint": good.step, "is_the_stops": same}

    events, job = disturb(cluster, folder, 20, act)
    seen = judge(events, job, 20)
    seen["ok"] = seen["ok"] and all(event["is_the_stops"] for event in events)
    return seen


def kills(cluster, folder: Path, rng: random.Random) -> dict:
    """Twenty times SIGKILL of the learner."""
    during = set(rng.sample(range(20), 5))

    def act(job, restart):
        resumed = job.status["resumed_learner_step"]
        job.wait_until(
            lambda: (list_checkpoints(job.run) or [(0, job.run)])[0][0] > resumed, "checkpoint"
        )
        (victim,) = [b for b in read_beats(job.run, restart) if b.name == "learner 0"]
        caught = False
        if restart in during:
            folder = job.run / "checkpoints"
            end_s = time.monotonic() + 30.0
            while not caught and time.monotonic() < end_s:
                caught = any(folder.glob("tmp-step-*"))
        else:
            time.sleep(rng.uniform(0.0, 3.0))
        os.kill(victim.pid, signal.SIGKILL)
        time.sleep(0.2)
        torn = [path.name for path in (job.run / "checkpoints").glob("tmp-step-*")]
        good = load_latest(job.run)
        return {
            "restart": restart,
            "checkpoint": good.step,
            "during_checkpoint": caught,
            "cut_off": torn,
        }

    events, job = disturb(cluster, folder, 20, act)
    seen = judge(events, job, 20)
    seen["cut_off_checkpoints"] = sum(bool(event["cut_off"]) for event in events)
    seen["ok"] = seen["ok"] and sum(event["during_checkpoint"] for event in events) >= 5
    return seen


PARTS = {"goal": goal, "wall": wall, "signals": signals, "kills": kills}


def main() -> int:
    """Run the parts, and keep earlier results of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {}
    if arguments.json and arguments.json.exists():
        figures = json.loads(arguments.json.read_text())
    with TestCluster(num_nodes=2, cpus=4, gpus=0) as cluster:
        for part in arguments.parts:
            with tempfile.TemporaryDirectory() as folder:
                figures[part] = PARTS[part](cluster, Path(folder) / part, random.Random(1))
            rest = {key: value for key, value in figures[part].items() if key != "events"}
            print(part, json.dumps(rest, indent=2), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if all(figures[part]["ok"] for part in arguments.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
