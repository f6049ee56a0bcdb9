"""Value rescaling h(x) and its inverse, without cancellation in float32.

Source: Pohlen et al. 2018, "Observe and Look Further", arXiv:1805.11593, section 3.2 and
Proposition A.2.

The textbook forms subtract nearly equal numbers: sqrt(|x|+1) - 1 for small x, and
sqrt(1 + 4 eps (...)) - 1 for any x. Both are written here with their conjugates, so that no
subtraction is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.checks import check_dtype

EPSILON = 1e-3
"""Linear part that keeps the inverse Lipschitz; the value of R2D2's table 2."""


def rescale(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x.

    Args:
      x: `<float32>[...]`.
      epsilon: at least 0.

    Returns:
      `<float32>[...]`.

    Raises:
      TypeError: `x` is not float32.
    """
    check_dtype("x", x, torch.float32)
    return x / ((x.abs() + 1).sqrt() + 1) + epsilon * x


def inverse_rescale(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return the y with `rescale(y, epsilon)` equal to `x`.

    With s = sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) the textbook value is
    sign(x) (z^2 - 1), z = (s - 1) / (2 epsilon) = 2 (|x| + 1 + epsilon) / (s + 1). Since
    z - 1 = 2 |x| / (s + 1 + 2 epsilon), it equals 2 x (z + 1) / (s + 1 + 2 epsilon).

    Args:
      x: `<float32>[...]`.
      epsilon: at least 0.

    Returns:
      `<float32>[...]`.

    Raises:
      TypeError: `x` is not float32.
    """
    check_dtype("x", x, torch.float32)
    shifted = x.abs() + (1 + epsilon)
    root = (1 + 4 * epsilon * shifted).sqrt()
    z = 2 * shifted / (root + 1)
    return 2 * x * (z + 1) / (root + (1 + 2 * epsilon))
