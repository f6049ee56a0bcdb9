import numpy as np
import pytest
import torch

from hpcrl.ops.q_targets import double_q_value, mixed_priority, n_step_targets, of_action

GAMMA, N = 0.5, 3


def column(*values):
    return torch.tensor(values)[:, None]


def targets(reward, discount, value, real, n=N, epsilon=None):
    return n_step_targets(
        column(*reward), column(*discount), column(*value), n, column(*real), epsilon
    )[:, 0].tolist()


def test_targets_sum_n_rewards_and_the_last_ones_take_fewer_steps():
    found = targets([1.0, 2.0, 3.0, 4.0], [GAMMA] * 4, [9.0, 9.0, 9.0, 16.0, 32.0], [True] * 4)
    assert found == [
        1 + 2 / 2 + 3 / 4 + 16 / 8,
        2 + 3 / 2 + 4 / 4 + 32 / 8,
        3 + 4 / 2 + 32 / 4,
        4 + 32 / 2,
    ]


def test_nothing_follows_a_termination():
    found = targets([1.0, 2.0, 3.0], [GAMMA, 0.0, GAMMA], [9.0, 9.0, 9.0, 8.0], [True] * 3)
    assert found == [1 + 2 / 2, 2.0, 3 + 8 / 2]


def test_a_truncated_episode_bootstraps_from_its_last_observation():
    # Row 2 is that observation, value 8; its transition is not real.
    found = targets(
        [1.0, 2.0, 0.0, 4.0], [GAMMA] * 4, [9.0, 9.0, 8.0, 9.0, 16.0], [True, True, False, True]
    )
    assert found[:2] == [1 + 2 / 2 + 8 / 4, 2 + 8 / 2]
    assert found[3] == 4 + 16 / 2


def literal_h(x, epsilon):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + epsilon * x


def literal_inverse(x, epsilon):
    root = np.sqrt(1 + 4 * epsilon * (abs(x) + 1 + epsilon))
    return np.sign(x) * (((root - 1) / (2 * epsilon)) ** 2 - 1)


def test_rescaled_targets_are_h_of_plain_rewards_and_unscaled_values():
    epsilon, value = 1e-3, np.float64(2.5)
    found = targets([10.0, -3.0], [0.9, 0.9], [0.0, 0.0, 2.5], [True, True], n=2, epsilon=epsilon)
    plain = literal_inverse(value, epsilon)
    expected = [
        literal_h(10 + 0.9 * (-3) + 0.81 * plain, epsilon),
        literal_h(-3 + 0.9 * plain, epsilon),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_double_q_takes_the_online_choice_and_the_target_networks_value():
    online = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    target = torch.tensor([[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]])
    assert double_q_value(online, target).tolist() == [20.0, 40.0]
    assert of_action(target, torch.tensor([[2], [1]], dtype=torch.int32)).tolist() == [30.0, 50.0]


def test_a_priority_mixes_largest_and_mean_of_the_real_errors():
    errors = torch.tensor([[1.0, -4.0], [-3.0, 2.0], [100.0, 3.0]])
    real = torch.tensor([[True, True], [True, True], [False, True]])
    found = mixed_priority(errors, real, 0.9)
    torch.testing.assert_close(found, torch.tensor([0.9 * 3 + 0.1 * 2, 0.9 * 4 + 0.1 * 3]))


def test_a_column_without_real_transitions_has_priority_zero():
    assert mixed_priority(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool), 0.9).item() == 0.0


def test_values_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="q_online"):
        double_q_value(torch.zeros(2, 3), torch.zeros(2, 4))
