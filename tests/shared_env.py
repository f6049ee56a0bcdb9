"""An environment of several ranks that ends the job when they aren't told the same."""

import gymnasium
import numpy as np


class SharedEnv(gymnasium.Env):
    """Episodes of 10 steps; the observation tells how many ranks take part."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, communicator):
        self._communicator = communicator
        self._steps = 0

    def _same_everywhere(self, value):
        mine = np.array([value], np.int64)
        others = np.empty(self._communicator.Get_size(), np.int64)
        self._communicator.Allgather(mine, others)
        assert (others == value).all(), f"ranks were told {others}"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._same_everywhere(-1 if seed is None else seed)
        self._steps = 0
        return np.array([self._communicator.Get_size(), 0], np.float32), {}

    def step(self, action):
        self._same_everywhere(int(action))
        self._steps += 1
        observation = np.array([self._communicator.Get_size(), self._steps], np.float32)
        return observation, 1.0, self._steps == 10, False, {}


def make(communicator):
    return SharedEnv(communicator)
