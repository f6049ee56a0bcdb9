"""What roles need of any network."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """Maps (`NetInputs` of `[T, B, ...]`, core state) to its outputs and the next core state.

    One function serves acting (T = 1) and learning.

    Attributes:
      state_size: S, length of the flat recurrent state; 0 without a core.
    """

    state_size: int

    def initial_state(self, batch_size: int) -> Tensor:
        """Return the state of rows that have seen nothing, `<float32>[batch_size, S]`."""
        return torch.zeros(batch_size, self.state_size, device=next(self.parameters()).device)
