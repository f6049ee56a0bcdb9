import numpy as np
import pytest
import torch

from hpcrl.ops.masks import transition_masks


def rows(*flags):
    return torch.tensor(flags, dtype=torch.bool)[:, None]


def test_termination_at_row_2_zeroes_the_discount_of_transition_1():
    masks = transition_masks(rows(0, 0, 1, 0, 0), rows(0, 0, 0, 0, 0), 0.9)
    np.testing.assert_allclose(masks.discount_t[:, 0], [0.9, 0, 0.9, 0.9])
    assert masks.real[:, 0].tolist() == [True, True, True, True]


def test_trap09_final_row_2_hides_transition_2_and_lets_transition_1_bootstrap():
    masks = transition_masks(rows(0, 0, 0, 0, 0), rows(0, 0, 1, 0, 0), 0.9)
    assert masks.real[:, 0].tolist() == [True, True, False, True]
    np.testing.assert_allclose(masks.discount_t[:2, 0], [0.9, 0.9])


def test_row_0_terminates_and_row_t_truncates_outside_the_transitions():
    masks = transition_masks(rows(1, 0, 0), rows(0, 0, 1), 0.9)
    np.testing.assert_allclose(masks.discount_t[:, 0], [0.9, 0.9])
    assert masks.real.all()


def test_final_row_0_hides_transition_0():
    assert transition_masks(rows(0, 0), rows(1, 0), 0.9).real.tolist() == [[False]]


def test_dtypes_are_checked():
    with pytest.raises(TypeError, match="terminated"):
        transition_masks(torch.zeros(3, 1), rows(0, 0, 0), 0.9)
