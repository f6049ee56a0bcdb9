"""Loss, gradient and metrics summed over a batch, part by part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpcrl.brain import Brain, autocast
from hpcrl.config.sections import LearnerConfig
from hpcrl.learning.batches import parts
from hpcrl.learning.optim import FlatParameters
from hpcrl.node.staging import Staging
from hpcrl.timing import StageTimer
from hpcrl.types import UnrollBatch


class NonFiniteLossError(RuntimeError):
    """The loss or gradient is NaN or infinite; the parameters were not touched by it."""


class Sums(NamedTuple):
    """What a batch came to; its gradient is in the flat buffer, a sum, too.

    Attributes:
      totals: `<float32>[]` each: count, loss, the agent's metrics, policy_lag and
        policy_lag_rows, over which the lag is a sum.
      priorities: `<float32>[B]`, of replay items; None without a replay.
    """

    totals: dict[str, Tensor]
    priorities: npt.NDArray[np.float32] | None


class Backward:
    """The forward and backward pass of one replica.

    Args:
      brain: the agent.
      config: precision and micro-batches.
      network: to learn; its parameters are views of `flat`.
      flat: gets the gradient.
      device: of the network.
      seed: of the run.
      bootstrap_rows: last rows of a batch that only bootstrap.
    """

    def __init__(
        self,
        brain: Brain,
        config: LearnerConfig,
        network: nn.Module,
        flat: FlatParameters,
        device: torch.device,
        seed: int,
        bootstrap_rows: int = 1,
    ):
        self._brain = brain
        self._config = config
        self._network = network
        self._flat = flat
        self._device = device
        self._seed = seed
        self._bootstrap_rows = bootstrap_rows
        self._generator = torch.Generator(device)
        self._staging = Staging(device)

    def run(
        self,
        batch: UnrollBatch,
        version: int,
        timer: StageTimer,
        target: nn.Module | None = None,
        scale: float = 1.0,
    ) -> Sums:
        """Sum over the micro-batches.

        Args:
          batch: in host memory.
          version: of the weights.
          timer: gets the stages copy and forward_backward.
          target: the target network, if the agent has one.
          scale: of the loss before the backward pass; the totals don't have it.
        """
        # The stream depends on seed and version alone, so a resumed run draws the same.
        self._generator.manual_seed((self._seed * 1_000_003 + version) % 2**63)
        self._flat.zero_grad()
        unrolls = batch.reward.shape[1]
        totals: dict[str, Tensor] = {}
        priorities = []
        edges = np.linspace(0, unrolls, self._config.micro_batches + 1).astype(int)
        for piece in parts(batch, edges, self._staging):
            timer.mark("copy")
            with autocast(self._config.precision, self._device):
                out = self._brain.loss(self._network, piece, self._generator, target)
            (out.loss_sum * scale).backward()
            if out.priorities is not None:
                priorities.append(out.priorities.float().cpu())
            extra = {"count": out.count, "loss": out.loss_sum.detach(), **self._lag(piece, version)}
            for name, value in (extra | out.metrics).items():
                totals[name] = totals[name] + value if name in totals else value
            timer.mark("forward_backward")
        return Sums(totals, torch.cat(priorities).numpy() if priorities else None)

    def _lag(self, piece: UnrollBatch, version: int) -> dict[str, Tensor]:
        """Return how far behind the rows that are trained on were acted, as a sum."""
        rows = len(piece.final) - self._bootstrap_rows
        acted = ~piece.final[:rows]
        lag = (version - piece.policy_version[:rows]).float()[acted]
        return {"policy_lag": lag.sum(), "policy_lag_rows": lag.new_tensor(float(lag.numel()))}


def explain_non_finite(what: str, value: float, agent_steps: int) -> str:
    """Say what a loss or gradient that isn't finite means for the run."""
    return (
        f"{what} {value} after {agent_steps} agent steps: the parameters were left as they "
        "were, the batch goes to the run directory, the last checkpoint is kept"
    )
