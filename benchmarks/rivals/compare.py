"""hpcrl against its rivals on equal work, in turns on one machine.

    benchmarks/rivals/install.sh FOLDER sb3 sample_factory rllib
    python benchmarks/rivals/compare.py FOLDER --rounds 2 --json benchmarks/results/rivals.json

Equal: game without sticky actions, Nature CNN with 512 units in float32, unrolls of 20 steps,
batches of 640 steps that are trained on once, 32 environments, one thread a process. Rates are
agent steps that were trained on per second, by each system's own counter, after a warm-up. The
order turns by one from round to round, as the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from hpcrl.run.metrics import read_metrics  # noqa: E402

RIVALS = {
    "sb3": ("sb3", ["sb3_ppo.py"]),
    "sample_factory": ("sample_factory", ["sample_factory_appo.py"]),
    "rllib_impala": ("rllib", ["rllib.py", "impala"]),
    "rllib_appo": ("rllib", ["rllib.py", "appo"]),
}
"""Virtual environment and program with its arguments behind the job, by name."""


OURS = {"hpcrl_seed": "breakout_vtrace.yaml", "hpcrl_impala": "breakout_impala.yaml"}
"""Configurations of hpcrl: inference ranks that batch for all actors, or workers that act alone."""


def hpcrl_rate(name, job, overrides):
    """Agent steps per second that were trained on, in the steady part of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "hpcrl",
            "train",
            str(ROOT / "configs" / OURS[name]),
        ]
        per_actor = job["envs"] // job["workers"]
        command += [
            "--topology.actors",
            str(job["workers"]),
            "--env.envs_per_actor",
            str(per_actor),
        ]
        command += ["--learner.unroll_steps", str(job["unroll"])]
        command += ["--learner.batch_unrolls", str(job["batch"] // job["unroll"])]
        command += ["--learner.threads", str(job["threads"])]
        command += ["--inference.threads", str(job["threads"])]
        command += ["--env.name", f"atari:{job['game']}", "--stop.frames", "0"]
        command += ["--stop.wall_time_s", str(job["warm_up_s"] + job["seconds"])]
        command += ["--checkpoint.every_s", "0", "--metrics.every_s", "1", "--run.dir", str(run)]
        limit_s = job["warm_up_s"] + job["seconds"] + 120
        done = subprocess.run(
            [*command, *overrides],
            stdout=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
            cwd=ROOT,
        )
        if done.returncode:
            raise SystemExit(f"{name} ended with code {done.returncode}")
        steady = [r for r in read_metrics(run) if r["wall_time_s"] >= job["warm_up_s"]]
    steps = steady[-1]["agent_steps"] - steady[0]["agent_steps"]
    return steps / (steady[-1]["wall_time_s"] - steady[0]["wall_time_s"])


def rival_rate(folder, name, job):
    """The same of a rival, and its version."""
    venv, (script, *arguments) = RIVALS[name]
    command = [
        str(folder / venv / "bin" / "python"),
        str(HERE / script),
        json.dumps(job),
        *arguments,
    ]
    limit_s = job["warm_up_s"] + job["seconds"] + 240
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if done.returncode or not lines:
        print(done.stdout[-2000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"{name} ended with code {done.returncode}")
    return json.loads(lines[-1])


def summarise(rates, labels):
    """Medians over the rounds, and those of hpcrl's layouts over each rival's.

    `ratio` is that of the best of either side.
    """
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ours = {name: medians.pop(name) for name in OURS}
    best, first = max(medians, key=medians.__getitem__), max(ours, key=ours.__getitem__)
    return {
        "ratio": ours[first] / medians[best],
        "best_rival": labels[best],
        "ratios": {
            name: {labels[rival]: rate / median for rival, median in medians.items()}
            for name, rate in ours.items()
        },
        "steps_per_s": rates,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the virtual environments")
    parser.add_argument("--rivals", nargs="+", default=["sb3", "sample_factory"], choices=RIVALS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up-s", type=float, default=20.0)
    parser.add_argument("--overrides", nargs="*", default=[], help="of hpcrl's configuration")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    job = {"game": "Breakout", "unroll": 20, "batch": 640, "envs": 32, "workers": 2, "threads": 1}
    job |= {"warm_up_s": arguments.warm_up_s, "seconds": arguments.seconds}
    names = [*OURS, *arguments.rivals]
    rates: dict[str, list[float]] = {name: [] for name in names}
    labels: dict[str, str] = {}
    for turn in range(arguments.rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if name in OURS:
                rate = hpcrl_rate(name, job, arguments.overrides)
            else:
                found = rival_rate(arguments.folder, name, job)
                rate, labels[name] = found["steps_per_s"], f"{found['name']} {found['version']}"
            rates[name].append(rate)
            print(f"{name}: {rate:.0f} agent steps/s", flush=True)
    results = {**summarise(rates, labels), "job": job}
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
