"""Limits of time around single environments: kept by the batch, to the same effect."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import OrderEnforcing, TimeLimit, TransformReward

from env_wrappers.sync import SyncBatch


class Countdown(gymnasium.Env):
    """Shows how many steps its episode took, and terminates at the seventh."""

    observation_space = gymnasium.spaces.Box(0, 7, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 7, False, {}


def ends(wrap, steps=16):
    """(step, observation at the end, terminated, truncated, steps of the episode) of one row."""
    batch = SyncBatch("test:countdown", [wrap(Countdown()), wrap(Countdown())], [0, 1])
    batch.reset()
    found = []
    for step in range(1, steps + 1):
        given = batch.step(np.zeros((2, 1), np.int32))
        np.testing.assert_array_equal(given.ended, given.ended[0])
        if given.ended[0]:
            final = given.final_observation
            shown = float(final["obs"][1, 0]) if final else None
            found.append(
                (
                    step,
                    shown,
                    bool(given.terminated[1]),
                    bool(given.truncated[1]),
                    int(given.episode_steps[1]),
                )
            )
            assert given.observation["obs"].tolist() == [[0.0], [0.0]]
    batch.close()
    return found


def unknown_to_the_batch(wrap):
    """The same limits behind a wrapper that the batch leaves alone."""
    return lambda env: TransformReward(wrap(env), lambda reward: reward)


@pytest.mark.parametrize(
    ("wrap", "wanted"),
    [
        (lambda env: env, [(7, None, True, False, 7), (14, None, True, False, 7)]),
        (
            lambda env: TimeLimit(env, 5),
            [(end, 5.0, False, True, 5) for end in (5, 10, 15)],
        ),
        (
            lambda env: TimeLimit(OrderEnforcing(TimeLimit(env, 4)), 6),
            [(end, 4.0, False, True, 4) for end in (4, 8, 12, 16)],
        ),
        (
            lambda env: TimeLimit(TimeLimit(env, 6), 4),
            [(end, 4.0, False, True, 4) for end in (4, 8, 12, 16)],
        ),
        (
            lambda env: TimeLimit(TimeLimit(env, 9), 7),
            [(7, None, True, False, 7), (14, None, True, False, 7)],
        ),
        (lambda env: TimeLimit(env, 1), [(end, 1.0, False, True, 1) for end in range(1, 17)]),
    ],
    ids=["none", "one", "an inner one", "an outer one", "termination goes first", "every step"],
)
def test_a_limit_ends_episodes_as_its_wrapper_does(wrap, wanted):
    assert ends(wrap) == wanted
    assert ends(unknown_to_the_batch(wrap)) == wanted


def test_environments_of_one_batch_keep_their_own_limits():
    envs = [TimeLimit(Countdown(), 2), Countdown(), TimeLimit(Countdown(), 3)]
    batch = SyncBatch("test:countdown", envs, [0, 1, 2])
    batch.reset()
    seen = [batch.step(np.zeros((3, 1), np.int32)).truncated.tolist() for _ in range(6)]
    first, last = [True, False, False], [False, False, True]
    assert seen == [[False] * 3, first, last, first, [False] * 3, [True, False, True]]


class Sharing(Countdown):
    """Observes into one buffer, as all others of its kind do."""

    buffer = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self.offset = float(seed)
        return super().reset()

    def step(self, action):
        observation, *rest = super().step(action)
        self.buffer[:] = observation + self.offset
        return self.buffer, *rest


def test_environments_may_share_the_memory_that_they_observe_into():
    batch = SyncBatch("test:sharing", [Sharing(), Sharing()], [0, 2])
    batch.reset()
    first = batch.step(np.zeros((2, 1), np.int32)).observation["obs"]
    batch.step(np.zeros((2, 1), np.int32))
    assert first.tolist() == [[1.0], [3.0]]
