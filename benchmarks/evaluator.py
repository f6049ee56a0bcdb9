"""What an evaluator rank shows of a training run, and what it costs the training.

    python -m benchmarks.evaluator --json benchmarks/results/evaluator.json

`eval/return` of CartPole over the frames that its weights were trained on, then alternating runs of
Breakout with an evaluator that plays without a pause, and without one. It is one rank more on the
same cores, so on a machine whose cores are all busy it takes its share of them while it plays.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from analysis.reader import Run
from benchmarks.recording import ROOT, alternate


def rise(folder: Path, agent_steps: int) -> dict:
    """The rounds of an evaluator during training on CartPole."""
    run = folder / "cartpole"
    command = [sys.executable, "-m", "hpcrl", "train", str(ROOT / "configs/cartpole_vtrace.yaml")]
    command += ["--run.dir", str(run), "--topology.evaluators", "1", "--evaluation.episodes", "8"]
    command += ["--stop.agent_steps", str(agent_steps), "--evaluation.every_s", "4"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    rounds = Run(run).metrics()[["eval/frames", "eval/return"]].dropna()
    return {
        "frames": rounds["eval/frames"].tolist(),
        "return": rounds["eval/return"].tolist(),
    }


def cost(folder: Path, pairs: int, agent_steps: int, before: dict | None) -> dict:
    """Training on Breakout with an evaluator that plays all the time over without one."""
    busy = ("--topology.evaluators", "1", "--evaluation.every_s", "1")
    figures, runs = alternate(folder, pairs, agent_steps, *busy, before=before)
    rounds = [run.metrics() for run in runs]
    count = [int(m["eval/return"].count()) if "eval/return" in m else 0 for m in rounds]
    return figures | {"rounds": [*(before or {}).get("rounds", []), *count]}


def main() -> int:
    """Measure and print; also write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="more of Breakout; 0: only CartPole")
    parser.add_argument("--agent-steps", type=int, default=15_000, help="of each run of Breakout")
    parser.add_argument("--json", type=Path, help="CartPole is kept, pairs are added")
    options = parser.parse_args()
    figures: dict = {}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text(encoding="utf-8"))

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as scratch:
        if "cartpole" not in figures:
            figures["cartpole"] = rise(Path(scratch), 150_000)
            write()
        if options.pairs:
            before = figures.get("breakout")
            figures["breakout"] = cost(Path(scratch), options.pairs, options.agent_steps, before)
            write()
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
