"""Makers of environments that can't be made, and of one that starts a process of its own."""

import ctypes
import os
import subprocess
import time

import gymnasium
import numpy as np


def raises():
    raise RuntimeError("no licence")


def exits():
    os._exit(9)


def crashes():
    ctypes.string_at(0)


def sleeps():
    time.sleep(1000)


class Family(gymnasium.Env):
    """Has a process of its own, and never finishes a step, holding the interpreter's lock."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.game = subprocess.Popen(["sleep", "1000"])

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        ctypes.PyDLL(None).sleep(1000)


def family():
    return Family()
