"""Stepping rate of environments in a child process against the same ones in this process.

    python benchmarks/isolation.py --json benchmarks/results/isolation.json

The two take turns, so that other work on the machine weighs on both alike; the ratio is that of the
medians of all turns. `cpu_ratio` compares the processor time of both processes together, which
other work doesn't touch.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import psutil

from env_wrappers import IsolatedBatch, Isolation, make

CASES = {
    "atari:Breakout, 8 environments": ("atari:Breakout", 8, 100),
    "gym:CartPole-v1, 8 environments": ("gym:CartPole-v1", 8, 1000),
    "gym:CartPole-v1, 64 environments": ("gym:CartPole-v1", 64, 200),
}
TURNS = 9


def cpu_s():
    """Processor time of this process and its living children."""
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children)


def steps_per_s(batch, actions, steps):
    """Agent steps per second of one turn."""
    start_s = time.perf_counter()
    for index in range(steps):
        batch.step(actions[index % len(actions)])
    return batch.num_envs * steps / (time.perf_counter() - start_s)


def measure(name, num_envs, steps):
    """Rates of both, by turns."""
    seeds = list(range(num_envs))
    batches = {
        "direct": make(name, num_envs, seeds),
        "isolated": IsolatedBatch(name, num_envs, seeds, {}, Isolation()),
    }
    actions = np.random.default_rng(0).integers(0, 2, (64, num_envs, 1)).astype(np.int32)
    rates: dict[str, list[float]] = {kind: [] for kind in batches}
    spent_s = dict.fromkeys(batches, 0.0)
    for batch in batches.values():
        batch.reset()
        steps_per_s(batch, actions, steps)
    for _ in range(TURNS):
        for kind, batch in batches.items():
            before_s = cpu_s()
            rates[kind].append(steps_per_s(batch, actions, steps))
            spent_s[kind] += cpu_s() - before_s
    for batch in batches.values():
        batch.close()
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {
        **{f"{kind}_steps_per_s": round(value) for kind, value in medians.items()},
        "ratio": round(medians["isolated"] / medians["direct"], 3),
        "cpu_ratio": round(spent_s["direct"] / spent_s["isolated"], 3),
        "added_us_per_batch_step": round(
            1e6 * num_envs * (1 / medians["isolated"] - 1 / medians["direct"]), 1
        ),
    }


def main() -> None:
    """Measure every case and print, or also write, the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {title: measure(*case) for title, case in CASES.items()}
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
