"""Environments that break on purpose, and tell in a file how often they did."""

import ctypes
import os
import time

import gymnasium
import numpy as np

FAULTS = {
    "raise": "raised",
    "shape": "garbage",
    "dtype": "garbage",
    "space": "garbage",
    "nan": "garbage",
    "reward": "garbage",
    "no_reward": "garbage",
    "hang": "hung",
    "segfault": "died",
    "exit": "died",
}
"""The kind as which each fault is to be counted."""


class BrokenEnv(gymnasium.Env):
    """Observes (seed modulo 2^20, episode, step); the reward is the step that it leads to.

    One of `faults` happens at a step, counted over its life, that its seed decides.
    """

    observation_space = gymnasium.spaces.Box(0.0, 2.0**20, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, faults, mean_steps, log, length, truncate):
        self.faults, self.mean_steps, self.log = faults, mean_steps, log
        self.length, self.truncate = length, truncate
        self.seed, self.episode, self.step_index, self.life = None, -1, 0, 0
        self.at_step, self.fault = 0, ""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed % 2**20
            rng = np.random.default_rng(seed)
            self.at_step = int(rng.integers(1, 2 * self.mean_steps))
            self.fault = str(rng.choice(self.faults)) if self.faults else ""
        self.episode += 1
        self.step_index = 0
        return self.observe(), {}

    def step(self, action):
        self.step_index += 1
        self.life += 1
        observation, reward = self.observe(), float(self.step_index)
        if self.life == self.at_step and self.fault:
            with open(self.log, "a") as file:
                file.write(self.fault + "\n")
            observation, reward = self.break_down(observation, reward)
        done = self.step_index == self.length
        return observation, reward, done and not self.truncate, done and self.truncate, {}

    def observe(self):
        return np.array([self.seed, self.episode, self.step_index], np.float32)

    def break_down(self, observation, reward):
        if self.fault == "raise":
            raise ValueError("this environment broke on purpose")
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "segfault":
            ctypes.string_at(0)
        if self.fault == "exit":
            os._exit(3)
        wrong = {
            "shape": (observation[:2], reward),
            "dtype": (observation.astype(np.complex64), reward),
            "space": (observation - 2.0**20, reward),
            "nan": (observation * np.nan, reward),
            "reward": (observation, float("nan")),
            "no_reward": (observation, None),
        }
        return wrong[self.fault]


def make(log: str = "", faults=(), mean_steps: int = 50, length: int = 7, truncate: bool = False):
    return BrokenEnv(list(faults), mean_steps, log, length, truncate)


def faults_in(path):
    """How often the environments that log to `path` broke, by the kind to be counted."""
    counts = dict.fromkeys(("raised", "garbage", "hung", "died"), 0)
    if path.exists():
        for fault in path.read_text().split():
            counts[FAULTS[fault]] += 1
    return counts
