"""Dynamic loss scaling for float16.

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_MIN_SCALE, _MAX_SCALE = 2.0**-24, 2.0**24


class LossScaler:
    """Keeps float16 gradients within range: multiply the loss by `scale`, then `unscale_`.

    A step whose gradient overflowed is skipped and the scale halved; after `growth_interval`
    good steps in a row it is doubled.

    With several learners, `unscale_` the REDUCED gradient: an overflow of any learner
    reaches all of them through the sum, so all skip the same step and keep one scale.

    Attributes:
      scale: factor of the loss, a power of two.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000):
        """Start with a scale.

        Args:
          scale: first factor of the loss.
          growth_interval: learner steps without an overflow before the scale is doubled.
        """
        self.scale = scale
        self._growth_interval = growth_interval
        self._good_steps = 0

    @torch.no_grad()
    def unscale_(self, flat_grad: Tensor) -> bool:
        """Divide a gradient by the scale in place, and adapt the scale.

        Args:
          flat_grad: `<float32>[size]`, gradient of the scaled loss.

        Returns:
          Whether the gradient is finite; if not, the optimizer must not step.
        """
        flat_grad.mul_(1.0 / self.scale)
        finite = bool(torch.isfinite(flat_grad.sum()))
        if not finite:
            self.scale = max(self.scale / 2, _MIN_SCALE)
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps >= self._growth_interval:
            self.scale = min(self.scale * 2, _MAX_SCALE)
            self._good_steps = 0
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run needs: `scale` `<float64>[]`, `good_steps` `<int64>[]`."""
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self._good_steps),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` gave."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
