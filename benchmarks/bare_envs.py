"""The bare loop over a family's single environments; runs under any interpreter that has them.

PYTHON -m benchmarks.bare_envs KEY GROUPS ROWS SECONDS
"""

import json
import sys
import time

import env_wrappers
from env_wrappers.families import FAMILIES


class BareSingles:
    """Single environments, each with an action of its own form, reset where they end."""

    def __init__(self, name, options, rows):
        self.envs = [env_wrappers.make_env(name, options) for _ in range(rows)]
        for seed, env in enumerate(self.envs):
            env.reset(seed=seed)
            env.action_space.seed(seed)
        self.actions = [[env.action_space.sample() for _ in range(64)] for env in self.envs]
        self.steps = 0

    def step(self):
        for env, actions in zip(self.envs, self.actions, strict=True):
            _, _, terminated, truncated, _ = env.step(actions[self.steps % 64])
            if terminated or truncated:
                env.reset()
        self.steps += 1

    def close(self):
        for env in self.envs:
            env.close()


def run_bare(loops, rows, seconds):
    """Step the loops in turn, `rows` each: (seconds, processor seconds, steps)."""
    steps, start_s, start_cpu_s = 0, time.perf_counter(), time.process_time()
    while not steps or time.perf_counter() - start_s < seconds:
        for loop in loops:
            loop.step()
            steps += rows
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s, steps


def main():
    """Step the family's example and print what `run_bare` gives."""
    key, groups, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    family = next(family for family in FAMILIES if family.key == key)
    name = f"{family.name}:{family.example}"
    loops = [BareSingles(name, dict(family.example_options), rows) for _ in range(groups)]
    print(json.dumps(run_bare(loops, rows, float(sys.argv[4]))))


if __name__ == "__main__":
    main()
