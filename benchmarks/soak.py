"""An hour of everything that goes wrong in Slurm jobs of 12 ranks on few cores, and no leaks.

    python -m benchmarks.soak --minutes 60 --json benchmarks/results/soak.json

Environments raise, give garbage, hang and crash all the time, each about once a minute. Every
minute or so an actor is killed (the run goes on without it), all stacks are asked for, or, where
--folder is a small file system, it is filled up for a while. After some minutes the start ends: by
a stop, by the death of a learner or inference rank, by a rank that stands still, or by an
exception in any role; then the run goes on in another job. `slurm/train_mpirun.sbatch` starts them.

Claim: every start ends with the documented code and cause, the next one goes on from its
checkpoint, memory and handles of every rank stay as they are after the warm-up, and nothing is left
behind: no process, no zombie, no segment of shared memory.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from benchmarks.batch_training import BatchTraining
from benchmarks.failing_envs import failures_in
from benchmarks.rank_samples import RankSamples, files_below
from hpcrl.run.checkpoint import load_latest
from hpcrl.run.heartbeat import DIED, read_beats
from hpcrl.run.metrics import read_metrics
from slurm.testcluster import TestCluster
from tests.breaking_job import BREAK, WORDS
from tests.job_runner import status_of

SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"
LOOK_S = 10.0
EVERY_S = 60.0
WARM_UP_S = 90.0
FULL_S = 20.0
START_S = 600.0  # at the lowest priority of a busy machine
SMALL_BYTES = 2**30
ENDS = ("stop", "kill learner", "kill inference", "stand still", "exception")
NO_FAILURE = (0, 2, 71, 75)


def configuration(folder: Path, mean_s: float) -> dict:
    """Two cells of actors and an evaluator; environments that mostly sleep."""
    env = {"log": str(folder / "failures"), "mean_s": mean_s, "step_time_s": 0.05}
    return {
        "layout": "seed",
        "run": {
            "dir": str(folder / "run"),
            "fault_tolerance": "ulfm",
            "silence_timeout_s": 150.0,
        },
        "env": {
            "name": "benchmarks.failing_envs:make",
            "options": env,
            "envs_per_actor": 2,
            "groups": 2,
            "isolation": "process",
            "step_timeout_s": 6.0,
            "start_timeout_s": 120.0,
            "max_restarts_per_hour": 10_000,
        },
        "topology": {"learners": 2, "inference": 2, "actors": 7, "evaluators": 1},
        "network": {"torso": "mlp", "hidden_sizes": [32]},
        "learner": {"batch_unrolls": 4, "unroll_steps": 10, "backend": "mpi"},
        "evaluation": {"episodes": 2, "envs": 2, "every_s": 20.0},
        "stop": {"agent_steps": 10**9},
        "metrics": {"every_s": 2.0},
        "checkpoint": {"every_s": 5.0},
        "recording": {"enabled": True, "segment_s": 60.0, "max_bytes": 10**7},
        "transport": {"deadline_s": 300.0},
    }


class Soak:
    """The run, its starts, and what was seen."""

    def __init__(self, cluster: TestCluster, folder: Path, words: Path, minutes: float, seed: int):
        self.cluster = cluster
        self.folder, self.run = folder, folder / "run"
        self.rng = random.Random(seed)
        self.begun_s = time.monotonic()
        self.end_s = self.begun_s + 60 * minutes
        self.minutes = minutes
        self.samples = RankSamples(WARM_UP_S, shortest_s=120.0)
        self.starts: list[dict] = []
        self.config = words / "soak.yaml"
        # 14 environments for training and 4 of the evaluator, 4 kinds: each once a minute.
        self.config.write_text(yaml.safe_dump(configuration(folder, 18 / 4 * 60.0)))
        self.sessions = words / "sessions"
        self.sessions.mkdir()

    def go(self, note: Callable[[dict], None]) -> None:
        """Start again and again until the time is up; tell `note` the figures after each start."""
        ends: list[str] = []
        while time.monotonic() < self.end_s - 60.0:
            ends = ends or self.rng.sample(ENDS, len(ENDS))
            # The first start lasts a third of it all, for a slow leak to be seen.
            lasts_s = 20 * self.minutes if not self.starts else self.rng.uniform(200.0, 420.0)
            left_s = self.end_s - time.monotonic()
            end = "stop" if lasts_s > left_s - 100.0 else ends.pop()
            start = self.one_start(min(lasts_s, left_s), end)
            self.starts.append(start)
            print(json.dumps(start), flush=True)
            note(self.figures())

    def one_start(self, lasts_s: float, end: str) -> dict:
        """Train for a while with minor mishaps, then end it."""
        before = status_of(self.run).get("counters", {}).get("learner_steps", 0)
        with BatchTraining(
            *(self.cluster, self.config),
            script="train_mpirun.sbatch",
            program="tests.breaking_job",
            env={"TMPDIR": str(self.sessions)},
        ) as job:
            job.wait_until(lambda: self._is_up(len(self.starts)), "start", timeout_s=START_S)
            shared = Path(psutil.Process(read_beats(self.run)[0].pid).environ()[SEGMENTS])
            events = self._mishaps(job, time.monotonic() + lasts_s)
            victim = self._end(job, end)
            ended_s = time.monotonic()
            code = job.process.wait(timeout=400.0)
            took_s = time.monotonic() - ended_s
            left = _left(job)
            output = job.output
        status, checkpoint = status_of(self.run), load_latest(self.run)
        cause = status["verdict"] if end != "exception" else output
        wanted = {"stop": "", "exception": WORDS, "stand still": victim}.get(end, "has died")
        ok = (
            (code == 75 if end == "stop" else code not in NO_FAILURE)
            and wanted in cause
            and not left
            and not files_below(shared)
            and checkpoint.step >= before
            and (end != "exception" or "Traceback" in output)
        )
        return {
            "end": end,
            "victim": victim,
            "seconds": round(lasts_s),
            "events": events,
            "code": code,
            "ended_in_s": round(took_s, 1),
            "learner_steps": [before, checkpoint.step],
            "left_processes": left,
            "left_in_shared_memory": files_below(shared),
            "left_sessions": files_below(self.sessions),
            "verdict": status["verdict"],
            "ok": ok,
            **({} if ok else {"output": output[-10_000:]}),
        }

    def _is_up(self, restart: int) -> bool:
        status = status_of(self.run)
        return status.get("state") == "running" and status.get("restart") == restart

    def _mishaps(self, job: BatchTraining, until_s: float) -> list[str]:
        events: list[str] = []
        next_s, next_look_s = time.monotonic() + EVERY_S, time.monotonic()
        while (now_s := time.monotonic()) < until_s:
            if job.process.poll() is not None:
                print(job.output[-5000:], flush=True)
                for stacks in (self.run / "logs" / "stacks").rglob("rank-*"):
                    print(stacks, stacks.read_text(errors="replace"), flush=True)
                raise SystemExit(f"the job ended by itself: {status_of(self.run)}")
            if now_s >= next_look_s:
                next_look_s = now_s + LOOK_S
                self.samples.look([b for b in read_beats(self.run) if b.stage != DIED])
            if now_s >= next_s:
                next_s = now_s + EVERY_S * self.rng.uniform(0.5, 1.5)
                events.append(self._mishap())
                print(events[-1], flush=True)
            time.sleep(0.5)
        return events

    def _mishap(self) -> str:
        beats = read_beats(self.run)
        alive = [b for b in beats if b.name.startswith("actor") and b.stage != DIED]
        kinds = ["stacks"]
        kinds += ["kill"] * (len(alive) > 4)
        space = os.statvfs(self.folder)
        kinds += ["full"] * (space.f_blocks * space.f_frsize < SMALL_BYTES)
        kind = self.rng.choice(kinds)
        if kind == "kill":
            victim = self.rng.choice(alive)
            os.kill(victim.pid, signal.SIGKILL)
            return f"killed {victim.name}"
        if kind == "stacks":
            done = subprocess.run(
                [sys.executable, "-m", "hpcrl", "stacks", str(self.run)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            return f"stacks: code {done.returncode}, {done.stdout.count('(rank ')} answers"
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(2**16)):
                    pass
            except OSError:
                time.sleep(FULL_S)
        ballast.unlink()
        return f"file system full for {FULL_S:g} s"

    def _end(self, job: BatchTraining, end: str) -> str:
        beats = [b for b in read_beats(self.run) if b.stage != DIED]
        if end == "stop":
            job.signal(signal.SIGTERM)
            return ""
        kind, _, role = end.partition(" ")
        if kind == "kill":
            victim = self.rng.choice([b for b in beats if b.name.startswith(role)])
            os.kill(victim.pid, signal.SIGKILL)
        else:
            role = self.rng.choice(["actor", "inference", "learner", "evaluator"])
            victim = self.rng.choice([b for b in beats if b.name.startswith(role)])
            os.kill(victim.pid, signal.SIGSTOP if end == "stand still" else BREAK)
        return victim.name

    def figures(self) -> dict:
        """What was seen, and whether the claim holds."""
        growth = self.samples.growth()
        records = read_metrics(self.run)
        steps = [record["learner_steps"] for record in records]
        figures = {
            "minutes": round((time.monotonic() - self.begun_s) / 60, 1),
            "starts": self.starts,
            "environment_failures": failures_in(self.folder / "failures"),
            "ranks": growth,
            "largest_rss_growth": max((row["rss_growth"] for row in growth), default=0.0),
            "handles_gained": sorted({name for row in growth for name in row["handles_gained"]}),
            "most_threads_gained": _most(growth, "threads"),
            "lasting_zombies": max((row["lasting_zombies"] for row in growth), default=0),
            "metrics_continuous": steps == sorted(steps),
        }
        figures["ok"] = (
            all(start["ok"] for start in self.starts)
            and figures["largest_rss_growth"] < 0.03
            and not figures["handles_gained"]
            and figures["most_threads_gained"] <= 0
            and figures["lasting_zombies"] == 0
            and figures["metrics_continuous"]
        )
        return figures


def _left(job: BatchTraining) -> list[str]:
    """Processes of the job that are still there half a minute after it."""
    end_s = time.monotonic() + 30.0
    while job.processes() and time.monotonic() < end_s:
        time.sleep(0.5)
    return [" ".join(process.cmdline()) for process in job.processes()]


def _most(growth: list[dict], what: str) -> int:
    return max((row[what][1] - row[what][0] for row in growth), default=0)


def main() -> int:
    """Soak, and tell what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the run; on a small file system: filled")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    def note(figures: dict) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        tempfile.TemporaryDirectory() as words,
        TestCluster(num_nodes=1, cpus=12) as cluster,
    ):
        soak = Soak(cluster, Path(folder), Path(words), arguments.minutes, arguments.seed)
        soak.go(note)
        figures = soak.figures()
    print(json.dumps({k: v for k, v in figures.items() if k not in ("starts", "ranks")}, indent=2))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
