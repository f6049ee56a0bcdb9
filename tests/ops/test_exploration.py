import numpy as np
import pytest

from hpcrl.ops.exploration import epsilon_ladder, explore


def test_the_ladder_is_the_published_one():
    # 0.4^(1 + 7 i / (N - 1)) of 4 environments.
    expected = [0.4, 0.4 ** (1 + 7 / 3), 0.4 ** (1 + 14 / 3), 0.4**8]
    np.testing.assert_allclose(epsilon_ladder(4), expected, rtol=1e-6)


def test_trap23_the_ladder_is_over_training_environments_and_evaluation_has_the_last_ids():
    exploration = explore(np.arange(6), num_envs=6, num_evaluation=2, evaluation_epsilon=1e-3)
    np.testing.assert_array_equal(exploration.epsilon[:4], epsilon_ladder(4))
    np.testing.assert_allclose(exploration.epsilon[4:], 1e-3)
    assert exploration.evaluation.tolist() == [False] * 4 + [True] * 2


def test_epsilon_follows_from_the_global_id_whoever_serves_the_environment():
    whole = explore(np.arange(10), 10, 3, 0.01)
    ids = np.array([7, 2, 9])
    some = explore(ids, 10, 3, 0.01)
    np.testing.assert_array_equal(some.epsilon, whole.epsilon[ids])
    np.testing.assert_array_equal(some.evaluation, whole.evaluation[ids])


def test_one_environment_must_be_left_for_training():
    with pytest.raises(ValueError, match="evaluation_envs 4 leaves none of the 4"):
        explore(np.arange(4), 4, 4, 0.01)
