import pytest
import torch

from hpcrl.learning.loss_scaling import LossScaler


def test_finite_gradients_are_divided_by_the_scale():
    scaler = LossScaler(scale=8.0)
    grad = torch.tensor([8.0, -4.0])
    assert scaler.unscale_(grad)
    assert grad.tolist() == [1.0, -0.5]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_skips_the_step_and_halves_the_scale(bad):
    scaler = LossScaler(scale=8.0)
    assert not scaler.unscale_(torch.tensor([1.0, bad]))
    assert scaler.scale == 4.0


def test_opposite_infinities_do_not_cancel():
    assert not LossScaler().unscale_(torch.tensor([float("inf"), float("-inf")]))


def test_the_scale_doubles_after_enough_good_steps_in_a_row():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    good, bad = torch.zeros(2), torch.tensor([float("nan"), 0.0])
    for grad, scale in ((good, 8), (good, 8), (bad, 4), (good, 4), (good, 4), (good, 8), (good, 8)):
        scaler.unscale_(grad.clone())
        assert scaler.scale == scale


def test_the_scale_stays_within_bounds():
    scaler = LossScaler(scale=2.0**24, growth_interval=1)
    scaler.unscale_(torch.zeros(1))
    assert scaler.scale == 2.0**24
    for _ in range(100):
        scaler.unscale_(torch.tensor([float("nan")]))
    assert scaler.scale == 2.0**-24


def test_a_resumed_scaler_goes_on_as_if_never_stopped():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    scaler.unscale_(torch.tensor([float("nan")]))
    scaler.unscale_(torch.zeros(1))
    resumed = LossScaler(growth_interval=3)
    resumed.load_state_dict(scaler.state_dict())
    for _ in range(2):
        scaler.unscale_(torch.zeros(1))
        resumed.unscale_(torch.zeros(1))
        assert resumed.scale == scaler.scale
    assert resumed.scale == 8.0
