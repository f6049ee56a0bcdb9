import numpy as np
import pytest

from env_wrappers import EnvError, make


def play(answer, episodes=200, num_envs=4, delay=3, num_actions=4):
    envs = make("synthetic:recall", num_envs, range(num_envs), {"delay": delay, "num_actions": 4})
    given, cue = envs.reset(), np.zeros(num_envs, int)
    returns: list[float] = []
    lengths: list[int] = []
    while len(returns) < episodes:
        shown = given.observation["obs"][:, :num_actions]
        cue = np.where(shown.any(1), shown.argmax(1), cue)
        given = envs.step(answer(cue, given.observation["obs"][:, -1] == 1)[:, None])
        returns += given.episode_return[given.ended].tolist()
        lengths += given.episode_steps[given.ended].tolist()
    return returns, lengths


def test_who_remembers_the_cue_gets_all_of_the_return():
    returns, lengths = play(lambda cue, asked: np.where(asked, cue, 0).astype(np.int32))
    assert set(returns) == {1.0}
    # The cue, the delay and the question.
    assert set(lengths) == {1 + 3 + 1}


def test_who_forgets_it_has_one_chance_in_four():
    returns, _ = play(lambda cue, asked: np.zeros(len(cue), np.int32), episodes=2000)
    assert np.mean(returns) == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 2000))


def test_the_cue_is_shown_once_and_nothing_between():
    envs = make("synthetic:recall", 1, [0], {"delay": 3})
    seen = [envs.reset().observation["obs"][0]]
    seen += [envs.step(np.zeros((1, 1), np.int32)).observation["obs"][0] for _ in range(4)]
    assert seen[0].sum() == seen[4].sum() == 1.0
    assert seen[0][-1] == 0.0
    assert seen[4][-1] == 1.0
    assert not np.any(seen[1:4])


def test_impossible_options_are_refused():
    with pytest.raises(EnvError, match="num_actions"):
        make("synthetic:recall", 1, [0], {"num_actions": 1})
