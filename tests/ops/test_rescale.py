import numpy as np
import pytest
import torch

from hpcrl.ops.rescale import EPSILON, inverse_rescale, rescale

VALUES = np.concatenate([np.linspace(-300, 300, 4001), np.logspace(-12, 6, 2000)])


def textbook(x, epsilon):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def textbook_inverse(x, epsilon):
    root = np.sqrt(1 + 4 * epsilon * (np.abs(x) + 1 + epsilon))
    return np.sign(x) * (((root - 1) / (2 * epsilon)) ** 2 - 1)


def test_equals_the_textbook_forms_in_float64():
    x = torch.tensor(VALUES, dtype=torch.float32)
    x64 = x.double().numpy()
    np.testing.assert_allclose(rescale(x), textbook(x64, EPSILON), rtol=3e-7, atol=1e-15)
    large = np.abs(x64) > 1  # below, the textbook form is inaccurate in float64, too
    want = textbook_inverse(x64[large], EPSILON)
    np.testing.assert_allclose(inverse_rescale(x)[torch.from_numpy(large)], want, rtol=1e-6)


def test_round_trip_in_float32():
    x = torch.tensor(VALUES, dtype=torch.float32)
    np.testing.assert_allclose(inverse_rescale(rescale(x)), x, rtol=1.5e-6)
    np.testing.assert_allclose(rescale(inverse_rescale(x)), x, rtol=1.5e-6)


def test_epsilon_zero_is_the_square_root():
    x = torch.tensor([-8.0, 0.0, 3.0])
    np.testing.assert_allclose(rescale(x, 0.0), [-2, 0, 1])
    np.testing.assert_allclose(inverse_rescale(torch.tensor([-2.0, 0.0, 1.0]), 0.0), [-8, 0, 3])


def test_gradient_at_zero_is_finite():
    x = torch.zeros(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(rescale(x).sum(), x)
    np.testing.assert_allclose(gradient, 0.5 + EPSILON)  # h'(0) = 1/2 + epsilon


def test_other_precisions_are_refused():
    with pytest.raises(TypeError, match="float32"):
        rescale(torch.zeros(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float32"):
        inverse_rescale(torch.zeros(1, dtype=torch.float16))
