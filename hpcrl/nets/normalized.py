"""An actor-critic network that normalizes what it sees by statistics of all that was seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import EnvSpec
from hpcrl.types import NetInputs, NetOutputs

_MIN_VARIANCE = 1e-8


class ObservationStatistics(nn.Module):
    """Count, mean and variance of each number of an observation.

    They are parameters without gradient, so that they are published, saved and compared with
    the weights, and whoever acts normalizes exactly as the learner does. Leaves of bytes and
    categories are left as they are.
    """

    def __init__(self, env: EnvSpec, clip: float):
        """Start with mean 0 and variance 1 over no observation.

        Args:
          env: whose observations.
          clip: largest magnitude of a normalized number.
        """
        super().__init__()
        self._clip = clip
        self._stacked = {
            path: leaf.stack > 1
            for path, leaf in env.observation.items()
            if leaf.kind == "box" and leaf.array.dtype.startswith("float")
        }
        shapes = [env.observation[path].array.shape for path in self._stacked]
        # Paths may hold dots, which names of parameters must not: numbered in leaf order.
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.mean = nn.ParameterList(_frozen(torch.zeros(shape)) for shape in shapes)
        self.variance = nn.ParameterList(_frozen(torch.ones(shape)) for shape in shapes)

    def forward(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return leaves `[T, B, ...]` by path, normalized."""
        normal = dict(observation)
        for path, mean, variance in zip(self._stacked, self.mean, self.variance, strict=True):
            scale = variance.clamp(min=_MIN_VARIANCE).rsqrt()
            normal[path] = ((observation[path] - mean) * scale).clamp(-self._clip, self._clip)
        return normal

    def numbers(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Return the newest frames' numbers side by side, `<float32>[T * B, K]`."""
        columns = []
        for path, stacked in self._stacked.items():
            leaf = observation[path].flatten(0, 1)
            newest = leaf[:, -1] if stacked else leaf
            columns.append(newest.reshape(len(newest), -1).float())
        if columns:
            return torch.cat(columns, -1)
        return next(iter(observation.values())).new_zeros((0, 0), dtype=torch.float32)

    @torch.no_grad()
    def merge(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """Take in a sample; Chan, Golub & LeVeque 1983, eq. (2.1) for the variance.

        Args:
          count: observations in it.
          mean: `<float32>[K]` of `numbers`.
          variance: `<float32>[K]`, of the population.
        """
        before = float(self.count)
        total = before + count
        first = 0
        for old_mean, old_variance in zip(self.mean, self.variance, strict=True):
            size = old_mean.numel()
            new_mean = mean[first : first + size].view_as(old_mean)
            new_variance = variance[first : first + size].view_as(old_variance)
            first += size
            delta = new_mean - old_mean
            spread = delta.square() * (before * count / total)
            old_variance.mul_(before).add_(new_variance * count + spread).div_(total)
            old_mean.add_(delta * (count / total))
        self.count.fill_(total)


class NormalizedActorCritic(ActorCritic):
    """`ActorCritic` over normalized observations; `statistics` are part of its parameters."""

    def __init__(
        self, env_spec: EnvSpec, distribution: ActionDistribution, clip: float, **settings: Any
    ):
        """Build the network; `settings` are the keywords of `ActorCritic`."""
        super().__init__(env_spec, distribution, **settings)
        self.statistics = ObservationStatistics(env_spec, clip)

    def forward(self, inputs: NetInputs, core_state: Tensor) -> tuple[NetOutputs, Tensor]:
        """Evaluate rows in order of time; see `ActorCritic.forward`."""
        return super().forward(
            inputs._replace(observation=self.statistics(inputs.observation)), core_state
        )


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
