"""Environments that fail at random, in every way, and tell it in a file."""

import ctypes
import os
import time

import gymnasium
import numpy as np

KINDS = {"raise": "raised", "garbage": "garbage", "hang": "hung", "segfault": "died"}
"""The name under which each kind of failure is to be counted."""


class FailingEnv(gymnasium.Env):
    """Episodes of `length` steps with reward 1; the life of each seed ends at a random time."""

    observation_space = gymnasium.spaces.Box(0.0, 1e6, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, log, mean_s, step_time_s, length):
        self.log, self.mean_s, self.step_time_s, self.length = log, mean_s, step_time_s, length
        self.step_index = 0
        self.kind, self.end_s = "", float("inf")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None and self.mean_s:
            rng = np.random.default_rng(seed)
            self.kind = str(rng.choice(list(KINDS)))
            self.end_s = time.monotonic() + rng.exponential(self.mean_s)
        self.step_index = 0
        return self.observe(), {}

    def step(self, action):
        time.sleep(self.step_time_s)
        self.step_index += 1
        observation = self.observe()
        if time.monotonic() > self.end_s:
            self.end_s = float("inf")
            with open(self.log, "a") as file:
                file.write(f"{self.kind}\n")
            if self.kind == "raise":
                raise ValueError("this environment broke on purpose")
            if self.kind == "hang":
                time.sleep(1000)
            if self.kind == "segfault":
                ctypes.string_at(0)
            observation = observation * np.nan
        return observation, 1.0, self.step_index >= self.length, False, {}

    def observe(self):
        return np.full(4, self.step_index, np.float32)


def make(log: str = os.devnull, mean_s: float = 0.0, step_time_s: float = 0.0, length: int = 50):
    """One that fails after `mean_s` seconds on average, 0: never."""
    return FailingEnv(log, mean_s, step_time_s, length)


def failures_in(path):
    """How often environments that log to `path` failed, by the name under which it is counted."""
    words = path.read_text().split() if path.exists() else []
    return {name: words.count(kind) for kind, name in KINDS.items()}
