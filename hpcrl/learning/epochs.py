"""A learner's replica that takes several optimizer steps on every batch."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from hpcrl.learning.batches import columns
from hpcrl.learning.trainer import StepResult, Trainer
from hpcrl.nets.normalized import NormalizedActorCritic
from hpcrl.timing import StageTimer
from hpcrl.types import UnrollBatch

_MIN_STD = 1e-8


class EpochTrainer(Trainer):
    """Epochs of minibatches over one batch of an agent that prepares it.

    Minibatch j of an epoch is the j-th share of every learner's own shuffled batch, and one
    optimizer step; the version of the weights advances by one for all of them together.
    """

    _bootstrap_rows = 0

    def step(
        self, batch: UnrollBatch, version: int, agent_steps: int, timer: StageTimer
    ) -> StepResult:
        """Train on a batch; see `Trainer.step`."""
        brain = self._brain
        prepared = brain.prepare(batch)
        num_steps = self._normalize_advantages(prepared)
        epochs, minibatches, max_kl = brain.epochs or (1, 1, 0.0)
        width = prepared.reward.shape[1]
        sums: dict[str, float] = defaultdict(float)
        updates, skipped = 0, False
        for epoch in range(epochs):
            seed = [self._seed, version, epoch, self._data_parallel.rank]
            order = np.random.default_rng(seed).permutation(width)
            kl = 0.0
            for chosen in np.array_split(order, minibatches):
                piece = columns(prepared, torch.from_numpy(chosen))
                timer.mark("batch")
                result = self._update(piece, version, agent_steps, timer)
                updates, skipped = updates + 1, skipped or result.skipped
                kl += result.values["kl"] / minibatches
                for name, value in result.values.items():
                    sums[name] += value
            # A mean over the global minibatches: all learners decide alike.
            if max_kl and kl > max_kl:
                break
        self._observe(prepared)
        values = {name: total / updates for name, total in sums.items()}
        values["epochs"] = updates / minibatches
        return StepResult(num_steps, values, skipped)

    def _summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of `<float64>[n]` over the learners."""
        flat = tensor.float().to(self._device).contiguous()
        self._data_parallel.sum_(flat)
        return flat.cpu().double()

    def _normalize_advantages(self, prepared: UnrollBatch) -> int:
        """Normalize in place over the global batch, in two passes; return its real rows."""
        advantage, real = prepared.behaviour["advantage"], ~prepared.final
        ours = advantage[real].double()
        total, count = self._summed(torch.stack([ours.sum(), real.sum().double()])).tolist()
        if self._brain.normalize_advantages:
            mean = total / max(count, 1.0)
            squares = self._summed((ours - mean).square().sum()[None]).item()
            std = (squares / max(count, 1.0)) ** 0.5
            advantage.copy_(torch.where(real, (advantage - mean) / (std + _MIN_STD), 0.0))
        return int(count)

    @torch.no_grad()
    def _observe(self, prepared: UnrollBatch) -> None:
        """Merge the global batch's observations into the network's statistics, if it has any."""
        if not isinstance(self._network, NormalizedActorCritic):
            return
        statistics = self._network.statistics
        numbers = statistics.numbers(prepared.observation).double()
        count_and_sum = torch.cat([torch.tensor([len(numbers)]).double(), numbers.sum(0)])
        count, *_ = (total := self._summed(count_and_sum)).tolist()
        mean = total[1:] / max(count, 1.0)
        variance = self._summed((numbers - mean).square().sum(0)) / max(count, 1.0)
        if count:
            statistics.merge(
                count, mean.float().to(self._device), variance.float().to(self._device)
            )
