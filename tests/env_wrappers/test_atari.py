"""The real emulator: what travels, lives, the frame cap, seeds."""

import sys

import numpy as np
import pytest

from env_wrappers import EnvError, make
from hpcrl.specs import EnvSpec

FIRE = 1


def atari(game="Breakout", seeds=(3, 4), **options):
    return make(f"atari:{game}", len(seeds), seeds, options)


def play(batch, steps, seed=0):
    """The reset and `steps` steps of random actions, as a list of StepBatch."""
    rng = np.random.default_rng(seed)
    count = EnvSpec.from_json(batch.spec).action.parts[0].nvec[0]
    actions = rng.integers(0, count, (steps, batch.num_envs, 1)).astype(np.int32)
    return [batch.reset(), *(batch.step(action) for action in actions)]


def fire(batch):
    return batch.step(np.full((batch.num_envs, 1), FIRE, np.int32))


def frames_of(steps, row):
    return np.stack([step.observation["obs"][row] for step in steps])


def test_spec_and_arrays_of_the_default_options():
    batch = atari()
    spec = EnvSpec.from_json(batch.spec)
    leaf = spec.observation["obs"]
    assert (leaf.array.shape, leaf.array.dtype, leaf.kind, leaf.stack) == (
        (84, 84),
        "uint8",
        "box",
        4,
    )
    assert spec.name == "atari:Breakout"
    assert spec.frame_skip == 4
    assert spec.action.parts[0].nvec == (4,)
    for step in play(batch, 3):
        assert step.observation["obs"].shape == (2, 84, 84)
        assert step.observation["obs"].dtype == np.uint8
        assert step.observation["obs"].max() > 0
        assert step.reward.dtype == step.episode_return.dtype == np.float32
        assert step.episode_steps.dtype == np.int32
        for flags in (step.terminated, step.truncated, step.valid, step.restarted, step.ended):
            assert flags.dtype == np.bool_
            assert flags.shape == (2,)


def test_options_reach_the_emulator():
    batch = atari(
        "ms_pacman",
        grayscale=False,
        image_height=40,
        image_width=50,
        frame_stack=2,
        frame_skip=3,
        full_action_space=True,
    )
    spec = EnvSpec.from_json(batch.spec)
    assert spec.observation["obs"].array.shape == (40, 50, 3)
    assert spec.observation["obs"].stack == 2
    assert spec.frame_skip == 3
    assert spec.action.parts[0].nvec == (18,)
    assert batch.reset().observation["obs"].shape == (2, 40, 50, 3)


def test_life_loss_ends_episodes_for_learning_but_not_the_reported_game():
    whole, lives = atari(life_loss=False), atari(life_loss=True)
    np.testing.assert_array_equal(
        whole.reset().observation["obs"], lives.reset().observation["obs"]
    )
    games = np.zeros(2, int)
    ends_of_life = np.zeros(2, int)
    while games.min() < 2:
        a, b = fire(whole), fire(lives)
        # The game itself is not touched by the option.
        for field in ("reward", "ended", "truncated", "episode_return", "episode_steps"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        np.testing.assert_array_equal(a.observation["obs"], b.observation["obs"])
        np.testing.assert_array_equal(a.terminated, a.ended)
        assert (b.terminated >= a.terminated).all()
        ends_of_life += b.terminated & (games < 2)
        games += a.ended
    assert ends_of_life.tolist() == [2 * 5, 2 * 5]  # five lives a game


def test_reported_return_and_steps_are_sums_over_the_whole_game():
    batch = atari(life_loss=True)
    total, steps = np.zeros(2), np.zeros(2, int)
    batch.reset()
    finished = 0
    rng = np.random.default_rng(1)
    while finished < 4:
        step = batch.step(rng.integers(0, 4, (2, 1)).astype(np.int32))
        total += step.reward
        steps += 1
        for row in np.flatnonzero(step.ended):
            assert step.episode_return[row] == total[row]
            assert step.episode_steps[row] == steps[row]
            total[row] = steps[row] = 0
            finished += 1


def test_frame_cap_truncates_with_the_final_frame():
    capped = play(atari("Seaquest", max_frames=200), 50)
    free = play(atari("Seaquest"), 50)
    for step in capped[:-1]:
        assert not step.ended.any()
    last = capped[-1]
    assert last.truncated.all()
    assert last.ended.all()
    assert not last.terminated.any()
    assert last.episode_steps.tolist() == [200 // 4] * 2
    # The final frame is what the uncapped game shows then.
    assert last.final_observation is not None
    final = last.final_observation["obs"]
    np.testing.assert_array_equal(final, free[-1].observation["obs"])
    assert not np.array_equal(final, last.observation["obs"])
    assert all(step.final_observation is None for step in capped[:-1])


def test_every_episode_has_the_cap_for_itself():
    ends = [step.ended[0] for step in play(atari(max_frames=38), 25)]
    assert np.flatnonzero(ends).tolist() == [10, 20]  # ten steps of four frames each


def test_life_lost_at_the_cap_terminates():
    batch = atari(life_loss=True)
    batch.reset()
    steps = 1
    while not fire(batch).terminated[0]:
        steps += 1
    batch = atari(life_loss=True, max_frames=4 * steps)
    batch.reset()
    for _ in range(steps):
        step = fire(batch)
    assert step.terminated[0]
    assert step.ended.all()
    assert step.truncated.tolist() == [False, True]


def test_same_seeds_repeat_and_different_seeds_differ():
    first, again, swapped = (
        play(atari(seeds=seeds), 60) for seeds in [(3, 4), (3, 4), (2**40, 2**41)]
    )
    for row in range(2):
        np.testing.assert_array_equal(frames_of(first, row), frames_of(again, row))
        assert not np.array_equal(frames_of(first, row), frames_of(swapped, row))
    assert not np.array_equal(frames_of(first, 0), frames_of(first, 1))


def test_trajectory_depends_on_the_seed_and_not_on_the_place():
    first, second = atari(seeds=(3, 4)), atari(seeds=(8, 3))
    first.reset()
    second.reset()
    for _ in range(60):
        a, b = fire(first), fire(second)
        np.testing.assert_array_equal(a.observation["obs"][0], b.observation["obs"][1])


def test_later_episodes_are_not_replays():
    batch = atari(seeds=(3,), max_frames=400, noop_max=0)
    batch.reset()
    actions = np.random.default_rng(0).integers(0, 4, (100, 1, 1)).astype(np.int32)
    episodes = [[batch.step(action).observation["obs"][0] for action in actions] for _ in range(2)]
    # The last row of each is the next game's first, after a reset without no-ops: equal.
    np.testing.assert_array_equal(episodes[0][-1], episodes[1][-1])
    # From there on, the same actions stick at other times.
    assert not np.array_equal(episodes[0], episodes[1])


def test_sticky_actions_can_be_switched_off():
    actions = np.zeros((1, 1), np.int32)
    moves = []
    for probability in (0.0, 1.0):
        batch = atari(
            seeds=(3,), repeat_action_probability=probability, noop_max=0, use_fire_reset=False
        )
        batch.reset()
        actions[:] = 2  # right
        moves.append([batch.step(actions).observation["obs"][0] for _ in range(5)])
    # Always repeating the action before means that the first, a no-op, lasts.
    assert not np.array_equal(moves[0][-1], moves[0][0])
    np.testing.assert_array_equal(moves[1][-1], moves[1][1])


def test_rewards_are_not_clipped():
    steps = play(atari("SpaceInvaders"), 300)
    assert max(step.reward.max() for step in steps) >= 5


def test_arrays_are_not_reused_by_the_next_step():
    batch = atari()
    step = batch.reset()
    kept = step.observation["obs"].copy()
    for _ in range(20):
        fire(batch)
    np.testing.assert_array_equal(step.observation["obs"], kept)


def test_impossible_action_is_refused_instead_of_blocking():
    batch = atari()
    batch.reset()
    with pytest.raises(EnvError, match="a category from 0 to 3, got 9"):
        batch.step(np.array([[9], [0]], np.int32))


@pytest.mark.parametrize("game", ["Breakout", "breakout", "MsPacman", "ms_pacman", "TicTacToe3D"])
def test_games_are_found_in_any_spelling(game):
    assert atari(game, seeds=(0,)).reset().observation["obs"].shape == (1, 84, 84)


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("Braekout", {}, "no Atari game 'Braekout'; did you mean 'Breakout'"),
        ("xyzzy", {}, "no Atari game 'xyzzy'; games: Adventure, "),
        ("Combat", {}, "no Atari game 'Combat'"),  # no single-player mode
        ("Pong", {"frameskip": 4}, "no option 'frameskip'; did you mean 'frame_skip'"),
        ("Pong", {"frame_skip": 0}, "frame_skip must be at least 1, got 0"),
        ("Pong", {"repeat_action_probability": 1.5}, "must be from 0.0 to 1.0, got 1.5"),
        ("Pong", {"max_frames": 3}, "max_frames must be at least 4"),
        ("Pong", {"reward_clipping": True}, "no option 'reward_clipping'"),
    ],
)
def test_what_cannot_work_is_refused(game, options, message):
    with pytest.raises(EnvError, match=message):
        atari(game, **options)


def test_missing_package_is_told_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(EnvError, match=r"can't be imported here.*pip install 'ale-py"):
        atari()
