"""A worker's gradient: of the mean loss over what it acted itself, clipped as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hpcrl.brain import Brain
from hpcrl.comm.wire import Layout
from hpcrl.config.sections import LearnerConfig
from hpcrl.learning.backward import Backward, NonFiniteLossError, explain_non_finite
from hpcrl.learning.batches import assemble
from hpcrl.learning.optim import FlatParameters, clip_by_global_norm
from hpcrl.specs import ArraySpec, EnvSpec
from hpcrl.timing import StageTimer
from hpcrl.types import UnrollBatch


class Gradient(NamedTuple):
    """A gradient with what its batch came to.

    Attributes:
      value: `<float32>[P]`, of the mean loss; a view that the next one overwrites.
      num_steps: real transitions, which the mean is over.
      figures: loss, their mean, and grad_norm, before the clip.
      metrics: the agent's, sums over the transitions.
    """

    value: npt.NDArray[np.float32]
    num_steps: int
    figures: Mapping[str, float]
    metrics: Mapping[str, float]


class GradientComputer:
    """A copy of the network that only ever computes gradients.

    Args:
      brain: the agent.
      config: precision, micro-batches and clip.
      device: where to compute.
      seed: of the loss's random stream.
    """

    def __init__(self, brain: Brain, config: LearnerConfig, device: torch.device, seed: int):
        network = brain.make_network(0).to(device).train()
        self._flat = FlatParameters(network)
        self._backward = Backward(brain, config, network, self._flat, device, seed)
        self._max_norm = config.optimizer.max_grad_norm
        self._agent_steps = 0

    def load(self, parameters: npt.NDArray[np.float32]) -> None:
        """Take over a whole copy of the parameters, `<float32>[P]`."""
        self._flat.value.copy_(torch.from_numpy(parameters))

    def compute(self, batch: UnrollBatch, version: int, timer: StageTimer) -> Gradient:
        """Return the gradient at the parameters that were loaded last.

        Args:
          batch: that these parameters acted, in host memory.
          version: theirs.
          timer: gets the stages copy and forward_backward.

        Raises:
          NonFiniteLossError: the loss or the gradient is not finite.
        """
        sums = self._backward.run(batch, version, timer).totals
        totals = {name: float(value) for name, value in sums.items()}
        count, loss = totals.pop("count"), totals.pop("loss")
        del totals["policy_lag"], totals["policy_lag_rows"]  # none: one version acted it all
        grad = self._flat.grad
        grad.div_(max(count, 1.0))
        for what, value in (("loss", loss), ("gradient", float(grad.sum()))):
            if not np.isfinite(value):
                raise NonFiniteLossError(explain_non_finite(what, value, self._agent_steps))
        self._agent_steps += int(count)
        norm = float(clip_by_global_norm(grad, self._max_norm))
        timer.mark("forward_backward")
        figures = {"loss": loss / max(count, 1.0), "grad_norm": norm}
        return Gradient(grad.cpu().numpy(), int(count), figures, totals)


def join_unrolls(
    unrolls: Sequence[npt.NDArray[np.uint8]],
    layout: Layout,
    env: EnvSpec,
    behaviour: Mapping[str, ArraySpec],
) -> UnrollBatch:
    """Return complete unrolls `<uint8>[n, nbytes]` as one batch."""
    messages = np.concatenate(unrolls)
    views = layout.views(messages)
    return assemble(views, np.arange(len(messages)), env, behaviour)
