"""The counting environment against arithmetic."""

import time

import numpy as np
import pytest

from env_wrappers import EnvError, make
from hpcrl.specs import EnvSpec


def counting(seeds, **options):
    return make("synthetic:counting", len(seeds), seeds, options)


def test_every_row_tells_seed_episode_and_step():
    batch = counting([5, 7], episode_length=3)
    step = batch.reset()
    for t in range(1, 10):
        np.testing.assert_array_equal(
            step.observation["obs"],
            [[5, (t - 1) // 3, (t - 1) % 3], [7, (t - 1) // 3, (t - 1) % 3]],
        )
        step = batch.step(np.zeros((2, 1), np.int32))
        # The action at step k gives k + 1, so rewards go 1, 2, 3, 1, 2, 3, ...
        assert step.reward.tolist() == [(t - 1) % 3 + 1] * 2
        assert step.terminated.tolist() == [t % 3 == 0] * 2
        assert not step.truncated.any()
        assert step.valid.all()
        assert not step.restarted.any()
        if t % 3 == 0:
            assert step.episode_return.tolist() == [1 + 2 + 3] * 2
            assert step.episode_steps.tolist() == [3, 3]


def test_truncated_episodes_give_their_final_observation():
    batch = counting([4], episode_length=2, truncate=True)
    batch.reset()
    step = batch.step(np.zeros((1, 1), np.int32))
    assert step.final_observation is None
    step = batch.step(np.zeros((1, 1), np.int32))
    assert step.truncated[0]
    assert step.ended[0]
    assert not step.terminated[0]
    assert step.final_observation["obs"].tolist() == [[4, 0, 2]]
    assert step.observation["obs"].tolist() == [[4, 1, 0]]


def test_length_spread_makes_rows_end_at_different_times():
    batch = counting([0, 1, 2, 3], episode_length=2, length_spread=2)
    batch.reset()
    ends = [batch.step(np.zeros((4, 1), np.int32)).ended for _ in range(12)]
    # Lengths 2 + (seed mod 3) = 2, 3, 4, 2.
    assert np.sum(ends, axis=0).tolist() == [12 // 2, 12 // 3, 12 // 4, 12 // 2]


def test_frames_hold_the_step_index_and_wrap_at_256():
    batch = counting([9], observation_shape=[2, 3], episode_length=300, frame_stack=4)
    leaf = EnvSpec.from_json(batch.spec).observation["obs"]
    assert (leaf.array.shape, leaf.array.dtype, leaf.stack) == ((2, 3), "uint8", 4)
    step = batch.reset()
    for k in range(299):
        assert step.observation["obs"].dtype == np.uint8
        assert (step.observation["obs"] == k % 256).all()
        step = batch.step(np.zeros((1, 1), np.int32))


def test_second_reset_starts_the_next_episode():
    batch = counting([0])
    batch.reset()
    batch.step(np.zeros((1, 1), np.int32))
    step = batch.reset()
    assert step.observation["obs"].tolist() == [[0, 1, 0]]
    assert batch.step(np.zeros((1, 1), np.int32)).episode_steps[0] == 1


def test_continuous_actions_can_be_asked_for():
    batch = counting([0, 1], action_size=3)
    action = EnvSpec.from_json(batch.spec).action
    assert (action.size, action.dtype) == (3, "float32")
    batch.reset()
    batch.step(np.full((2, 3), 9.0, np.float32))
    with pytest.raises(EnvError, match="got nan"):
        batch.step(np.full((2, 3), np.nan, np.float32))


@pytest.mark.parametrize("mode", ["sleep", "compute"])
def test_step_time_is_spent_by_every_environment(mode, monkeypatch):
    clock = {"thread": 0.0, "slept": 0.0}

    def thread_time():
        clock["thread"] += 0.001
        return clock["thread"]

    def sleep(duration_s):
        clock["slept"] += duration_s

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "thread_time", thread_time)
    batch = counting([0, 1, 2, 3], step_time_s=0.01, step_time_mode=mode)
    batch.reset()
    batch.step(np.zeros((4, 1), np.int32))
    spent = clock["slept"] if mode == "sleep" else clock["thread"]
    assert spent == pytest.approx(4 * 0.01, abs=0.003)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_length": 0}, "episode_length must be at least 1, got 0"),
        ({"episode_lenght": 5}, "no option 'episode_lenght'; did you mean 'episode_length'"),
        ({"step_time_s": -1.0}, "step_time_s must be at least 0"),
        ({"step_time_mode": "slep"}, "one of sleep, compute, got 'slep'; did you mean 'sleep'"),
        ({"truncate": 1}, "truncate must be of type bool, got 1"),
        ({"episode_length": True}, "episode_length must be of type int, got True"),
        ({"episode_length": 2.5}, "episode_length must be of type int, got 2.5"),
        ({"observation_shape": [0]}, "observation_shape must be positive lengths"),
        ({"observation_shape": 84}, "observation_shape must be of type tuple, got 84"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(EnvError, match=message):
        counting([0], **options)


def test_unknown_synthetic_environment_is_refused():
    with pytest.raises(EnvError, match="'count'; did you mean 'counting'"):
        make("synthetic:count", 1, [0], {})
