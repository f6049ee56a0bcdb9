"""What the adapter adds to the package; collected where gfootball is installed."""

import numpy as np
import pytest

import env_wrappers
from env_wrappers import EnvError

NAME = "football:academy_empty_goal_close"


def make(**options):
    env = env_wrappers.make_env(NAME, options)
    env.reset(seed=4)
    return env


def test_an_episode_whose_time_is_up_is_truncated_and_one_that_was_lost_isnt():
    for duration, wanted in ((5, (False, True)), (400, (True, False))):
        env = make()
        engine = env.unwrapped._game.unwrapped._env._env
        engine.config.game_duration = duration
        # The scenario ends when the ball changes hands, as it does where nobody acts.
        ends = (False, False)
        while not any(ends):
            _, reward, *ends, _ = env.step(0)
        assert tuple(ends) == wanted, duration
        assert reward == 0
        env.close()


def test_minimaps_are_those_of_the_package_as_flags():
    from gfootball.env.observation_preprocessing import generate_smm

    env = make()
    for action in (5, 5, 12):
        seen = env.step(action)[0]
        wanted = generate_smm(env.unwrapped._game.unwrapped.observation())[0]
        assert set(np.unique(wanted)) == {0, 255}
        np.testing.assert_array_equal(seen, wanted == 255)
    env.close()


@pytest.mark.parametrize(("size", "shape"), [("medium", (90, 120, 4)), ("large", (108, 144, 4))])
def test_the_larger_minimaps_of_seed(size, shape):
    env = make(smm_size=size)
    assert env.observation_space.shape == env.step(0)[0].shape == shape
    env.close()


def test_checkpoints_reward_the_way_to_the_goal():
    """A goal straight away: scoring gives 1, with the ten checkpoints of 0.1 it is 2."""
    totals = []
    for rewards in ("scoring", "scoring,checkpoints"):
        env = make(rewards=rewards)
        total, done, steps = 0.0, False, 0
        while not done:
            # Run right (5), and shoot (12) from the fifth step on.
            _, reward, terminated, truncated, _ = env.step(5 if steps < 5 else 12)
            total, done, steps = total + reward, terminated or truncated, steps + 1
        totals.append(total)
        env.close()
    assert totals == [1.0, pytest.approx(2.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"representation": "raw"}, "representation must be one of smm, simple115v2, got 'raw'"),
        ({"rewards": "checkpoints"}, "rewards must be one of scoring"),
        ({"smm_size": "huge"}, "smm_size must be one of default, medium, large"),
    ],
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(EnvError, match=message):
        env_wrappers.make(NAME, 1, [0], options)
