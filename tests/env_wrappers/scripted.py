"""Environments that follow a script, so that every transition is known beforehand."""

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

# (steps, terminated, truncated) of the episodes, over and over; environment i starts at the
# i-th, so that the rows of a batch end at different times.
SCRIPT = [(3, True, False), (2, False, True), (1, True, True), (1, False, True), (4, True, False)]


def script_at(index, episode):
    return SCRIPT[(index + episode) % len(SCRIPT)]


def reward_of(index, episode, step, action):
    """Reward of `action` taken at `step`."""
    return 100.0 * index + 10.0 * episode + step + 0.25 * action


class ScriptedEnv(gymnasium.Env):
    """Observes (index, episode, step); the action taken enters the reward."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, index):
        self.index, self.episode, self.step_index = index, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.step_index = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        steps, terminated, truncated = script_at(self.index, self.episode)
        assert self.step_index < steps, "stepped past the end of an episode"
        reward = reward_of(self.index, self.episode, self.step_index, action)
        self.step_index += 1
        done = self.step_index == steps
        return self.observe(), reward, done and terminated, done and truncated, {}

    def observe(self):
        return np.array([self.index, self.episode, self.step_index], np.float32)


class ScriptedVectorEnv(VectorEnv):
    """The three autoreset modes as other libraries' environments have them.

    One buffer is used for all observations; the NEXT_STEP reset step reports a reward; the
    SAME_STEP `final_obs` is a dense array, with garbage for the environments that are not done.
    """

    def __init__(self, num_envs, mode):
        self.num_envs = num_envs
        self.mode = AutoresetMode[mode]
        self.metadata = {"autoreset_mode": self.mode}
        self.envs = [ScriptedEnv(index) for index in range(num_envs)]
        self.single_observation_space = ScriptedEnv.observation_space
        self.single_action_space = ScriptedEnv.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.buffer = np.zeros((num_envs, 3), np.float32)
        self.done = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        for row in np.flatnonzero(mask):
            self.buffer[row] = self.envs[row].reset()[0]
        self.done &= ~mask
        return self.buffer, {}

    def step(self, actions):
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        final = np.full((self.num_envs, 3), 777.0, np.float32)
        for row, env in enumerate(self.envs):
            if self.mode == AutoresetMode.NEXT_STEP and self.done[row]:
                self.buffer[row], reward[row] = env.reset()[0], 0.05
                continue
            self.buffer[row], reward[row], terminated[row], truncated[row], _ = env.step(
                actions[row]
            )
            if self.mode == AutoresetMode.SAME_STEP and (terminated[row] or truncated[row]):
                final[row] = self.buffer[row]
                self.buffer[row] = env.reset()[0]
        self.done = terminated | truncated
        info = {}
        if self.mode == AutoresetMode.SAME_STEP and self.done.any():
            info["final_obs"] = final
        return self.buffer, reward, terminated, truncated, info


def make_single(size: int = 3):
    """Any single environment; for tests of the user's function."""
    assert size == 3
    return ScriptedEnv(0)


def make_vector(num_envs, mode="NEXT_STEP"):
    return ScriptedVectorEnv(num_envs, mode)


def make_undeclared(num_envs):
    envs = ScriptedVectorEnv(num_envs, "NEXT_STEP")
    envs.metadata = {}
    return envs


def make_two():
    return ScriptedVectorEnv(2, "SAME_STEP")


def make_text():
    return "not an environment"


not_a_function = 3
