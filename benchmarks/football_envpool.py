"""Football through `gfootball` and through EnvPool: rates by turns, and what random play brings.

    python benchmarks/football_envpool.py --json benchmarks/results/football_envpool.json

Both step the same scenario with the same random actions, one thread each, in turns, so that
other work weighs on both alike.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from env_wrappers import make

SCENARIOS = ("academy_empty_goal_close", "academy_3_vs_1_with_keeper")
NUM_ENVS = 8
STEPS_PER_TURN = 60


def measure(scenario, turns):
    """Rates, shares of their ratio, and returns of both."""
    names = {"gfootball": f"football:{scenario}", "envpool": f"envpool:gfootball/{scenario}-v1"}
    batches = {kind: make(name, NUM_ENVS, range(NUM_ENVS)) for kind, name in names.items()}
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {kind: [] for kind in batches}
    cpu_s = dict.fromkeys(batches, 0.0)
    found = {kind: {"episodes": 0, "goals": 0, "truncated": 0, "steps": 0} for kind in batches}
    for batch in batches.values():
        batch.reset()
    for _ in range(turns):
        actions = rng.integers(0, 19, (STEPS_PER_TURN, NUM_ENVS, 1)).astype(np.int32)
        for kind, batch in batches.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for action in actions:
                step = batch.step(action)
                found[kind]["episodes"] += int(step.ended.sum())
                found[kind]["goals"] += int((step.episode_return[step.ended] > 0).sum())
                found[kind]["truncated"] += int(step.truncated.sum())
                found[kind]["steps"] += int(step.valid.sum())
            cpu_s[kind] += time.process_time() - start_cpu_s
            seconds = time.perf_counter() - start_s
            rates[kind].append(NUM_ENVS * STEPS_PER_TURN / seconds)
    leaves = {kind: batch.spec["observation"]["obs"] for kind, batch in batches.items()}
    for batch in batches.values():
        batch.close()
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {
        "envpool_of_gfootball": round(medians["envpool"] / medians["gfootball"], 3),
        "by_processor_time": round(
            found["envpool"]["steps"]
            / cpu_s["envpool"]
            / (found["gfootball"]["steps"] / cpu_s["gfootball"]),
            3,
        ),
        "observations": {kind: [leaf["kind"], leaf["array"]] for kind, leaf in leaves.items()},
        "random_play": found,
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=12)
    arguments = parser.parse_args()
    result = {scenario: measure(scenario, arguments.turns) for scenario in SCENARIOS}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
