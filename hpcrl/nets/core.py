"""Recurrent cores: what the network carries from one step to the next.

A core's state is one flat vector per row, so that it can be stored and sent without knowing
the core. It is set to zero BEFORE the cell sees the first observation of an episode, inside
the core, so acting (T = 1) and learning (T+1 rows) cannot disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcrl.checks import check_shape


class NoCore(nn.Module):
    """The identity; its state is empty.

    Attributes:
      output_size: features per row.
      state_size: 0.
    """

    def __init__(self, input_size: int):
        super().__init__()
        self.output_size = input_size
        self.state_size = 0

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` and `state`."""
        return x, state


class LSTMCore(nn.Module):
    """A long short-term memory cell; its state is h and c, one after the other.

    Hochreiter & Schmidhuber 1997 with forget gates, whose bias starts at 1. Recurrent
    weights start orthogonal. The state stays float32 under autocast.

    Attributes:
      output_size: H, units.
      state_size: 2 H.
    """

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.output_size = size
        self.state_size = 2 * size
        self.input = nn.Linear(input_size, 4 * size)
        self.recurrent = nn.Linear(size, 4 * size, bias=False)
        nn.init.xavier_uniform_(self.input.weight)
        nn.init.zeros_(self.input.bias)
        nn.init.ones_(self.input.bias[size : 2 * size])
        nn.init.orthogonal_(self.recurrent.weight)

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Unroll the cell over time.

        Args:
          x: `[T, B, input_size]`.
          start: `<bool>[T, B]`, the state is zero before this row.
          state: `<float32>[B, 2 H]`, before row 0.

        Returns:
          Outputs `<float32>[T, B, H]`, and the state after the last row.

        Raises:
          ValueError: shapes do not fit.
        """
        num_rows, batch_size, _ = x.shape
        check_shape("start", start, num_rows, batch_size)
        check_shape("core_state", state, batch_size, self.state_size)
        projected = self.input(x)  # [T, B, 4 H], gates i, f, g, o
        h, c = state.chunk(2, -1)
        outputs = []
        for t in range(num_rows):
            reset = start[t, :, None]
            h, c = h.masked_fill(reset, 0.0), c.masked_fill(reset, 0.0)
            gates = projected[t] + self.recurrent(h)
            i, f, g, o = gates.float().chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), torch.cat([h, c], -1)
