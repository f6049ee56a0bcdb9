"""Kill a training job at random times, resume it each time, and compare with an unbroken run.

    python benchmarks/kill_and_resume.py --kills 20 --json benchmarks/results/kill_and_resume.json

Half of the kills are SIGTERM to `hpcrl train` (agreed stop, code 75), half are SIGKILL to
every process of the job. Claim: every directory is resumable, counters and learning rate
end as in the unbroken run, and metrics.jsonl is continuous.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from hpcrl.run.checkpoint import load_latest
from hpcrl.run.metrics import read_metrics

CONFIG = "configs/counting.yaml"


def start(run: Path, agent_steps: int) -> subprocess.Popen:
    """Start or resume the job."""
    command = [sys.executable, "-m", "hpcrl", "train", CONFIG, "--run.dir", str(run)]
    command += ["--stop.agent_steps", str(agent_steps), "--resume", "auto"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_everything(process: subprocess.Popen) -> None:
    """SIGKILL the launcher, mpirun and all ranks at once."""
    parent = psutil.Process(process.pid)
    for victim in [*parent.children(recursive=True), parent]:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def outcome(run: Path) -> dict:
    """Counters and schedule of the newest checkpoint and the last record."""
    checkpoint = load_latest(run)
    records = read_metrics(run)
    steps = [record["learner_steps"] for record in records]
    return {
        "counters": {
            name: checkpoint.state["counters"][name]
            for name in ("learner_steps", "agent_steps", "frames")
        },
        "learning_rate": records[-1]["learning_rate"],
        "optimizer_steps": int(checkpoint.tensors["optimizer.step_count"]),
        "metrics_increase": steps == sorted(set(steps)),
    }


def main() -> int:
    """Run both jobs and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--agent-steps", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        broken, unbroken = Path(folder) / "broken", Path(folder) / "unbroken"
        codes, steps = [], []
        for index in range(arguments.kills):
            process = start(broken, arguments.agent_steps)
            time.sleep(rng.uniform(2.0, 25.0))
            kind = "SIGTERM" if index % 2 == 0 else "SIGKILL"
            if kind == "SIGTERM":
                process.terminate()
                process.wait(timeout=120)
            else:
                kill_everything(process)
            checkpoint = load_latest(broken) if (broken / "checkpoints").exists() else None
            codes.append([kind, process.returncode])
            steps.append(checkpoint.step if checkpoint else 0)
            print(kind, "code", process.returncode, "newest checkpoint", steps[-1], flush=True)
        for run in (broken, unbroken):
            code = start(run, arguments.agent_steps).wait()
            print(run.name, "ended with code", code, flush=True)
        figures = {
            "kills": codes,
            "checkpoint_steps": steps,
            "broken": outcome(broken),
            "unbroken": outcome(unbroken),
        }
    figures["equal"] = figures["broken"] == figures["unbroken"]
    figures["ratio"] = float(figures["equal"] and steps == sorted(steps))
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["ratio"] == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
