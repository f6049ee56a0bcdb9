"""EnvPool beside ALE: the same frames and rewards for the same actions; what it refuses.

`conftest.py` collects this only where envpool is installed, and says so where it isn't.
"""

import numpy as np
import pytest

from env_wrappers import EnvError, make

# Games whose start ALE and EnvPool bring about by the same button.
GAMES = ["Pong", "Breakout", "Qbert", "Seaquest"]


def played(name, options, steps=250):
    """Rewards and frames up to the first end."""
    batch = make(name, 1, [3], options)
    rng = np.random.default_rng(0)
    count = batch.spec["action"]["parts"][0]["nvec"][0]
    rewards, frames = [], [batch.reset().observation["obs"].reshape(84, 84)]
    for _ in range(steps):
        step = batch.step(rng.integers(0, count, (1, 1)).astype(np.int32))
        if step.ended[0] or not step.valid[0]:
            break
        rewards.append(float(step.reward[0]))
        frames.append(step.observation["obs"].reshape(84, 84))
    batch.close()
    return rewards, np.stack(frames)


@pytest.mark.parametrize("game", GAMES)
def test_rewards_and_frames_are_those_of_ale(game):
    fixed = {"repeat_action_probability": 0.0, "noop_max": 1}
    rewards, frames = played(f"atari:{game}", fixed)
    pool_rewards, pool_frames = played(f"envpool:{game}-v5", {"kwargs": fixed})
    assert len(rewards) > 100
    assert pool_rewards == rewards
    np.testing.assert_array_equal(pool_frames, frames)


def test_actions_frames_and_stack_are_those_of_the_atari_family():
    ours, pool = make("atari:Pong", 1, [0]), make("envpool:Pong-v5", 1, [0], {"frame_stack": 4})
    for key in ("action", "frame_skip"):
        assert pool.spec[key] == ours.spec[key]
    assert pool.spec["observation"]["obs"]["stack"] == 4
    ours.close()
    pool.close()


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("Pong-v6", {}, "there is no EnvPool task 'Pong-v6'; did you mean 'Pong-v5'"),
        ("Pong-v5", {"kwargs": {"noopmax": 3}}, "no setting 'noopmax'.*did you mean 'noop_max'"),
        ("Pong-v5", {"kwargs": {"seed": 3}}, "no setting 'seed' among its kwargs"),
        ("Pong-v5", {"num_threads": 0}, "num_threads must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(task, options, message):
    with pytest.raises(EnvError, match=message):
        make(f"envpool:{task}", 1, [0], options)
