"""Environments for jobs under test, as a user's `module:function`."""

import os
import sys
import time

import gymnasium
import numpy as np


class CountingEnv(gymnasium.Env):
    """Episodes of 5 steps that terminate; what goes wrong does so at step `at_step` of its life."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, fault, at_step, step_time_s):
        self.fault, self.at_step, self.step_time_s = fault, at_step, step_time_s
        self.step_index = self.life = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_index = 0
        return self.observe(), {}

    def step(self, action):
        time.sleep(self.step_time_s)
        self.step_index += 1
        self.life += 1
        reward = 1.0
        if self.life == self.at_step:
            if self.fault == "raise":
                raise ValueError("this environment broke on purpose")
            reward = 3e38 if self.fault == "reward" else reward
        return self.observe(), reward, self.step_index == 5, False, {}

    def observe(self):
        wrong = self.fault == "shape" and self.life == self.at_step
        return np.full(3 if wrong else 2, self.step_index, np.float32)


def make(fault: str = "", at_step: int = 30, step_time_s: float = 0.0, slow_rank: int = -1):
    """A counting environment, in an actor that must not have loaded torch."""
    assert "torch" not in sys.modules, "an actor loaded torch"
    if os.environ.get("OMPI_COMM_WORLD_RANK") == str(slow_rank):
        step_time_s *= 10
    return CountingEnv(fault, at_step, step_time_s)
