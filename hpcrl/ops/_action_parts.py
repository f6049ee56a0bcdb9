"""Distributions of the components of one action part, from parameters `<float32>[..., P]`.

Continuous components, with the box [low, high] mapped onto [-1, 1] (a = middle + half y):

- tanh-normal: y = tanh(u), u normal. Only the action travels, so `log_prob` recovers u as
  atanh(y), with |y| clamped to 1 - 1e-6 (|u| up to 7.25). Samples are clamped alike, and the
  behaviour policy's log-probability is computed from the action as it travels, so the ratio
  of two policies is that of their densities at one point, at the bounds, too.
- clipped normal: y = clip(u, -1, 1), a normal whose tails collect in two atoms at the
  bounds. `log_prob` gives the mass of the atom there and the density elsewhere, which is the
  likelihood of what was executed (Fujita & Maeda 2018, arXiv:1802.07564, section 3).

A component with an infinite bound cannot be squashed: it is a clipped normal in the
environment's own units, that is a plain normal where both bounds are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MIN_LOG_STD, MAX_LOG_STD = -10.0, 2.0
"""Range to which log standard deviations are clamped (no gradient beyond)."""

_TANH_LIMIT = 1.0 - 1e-6
_PAD_LOGIT = -1e9
_FAR = 1e6
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_QUADRATURE_NODES = 32


class PartDistribution(Protocol):
    """A distribution of some components of an action, built from its own parameters."""

    num_params: int

    def sample(self, params: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return draws `[..., n]`."""

    def mode(self, params: Tensor) -> Tensor:
        """Return the greedy components `[..., n]`."""

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability (density), summed over components, `[...]`."""

    def entropy(self, params: Tensor) -> Tensor:
        """Return the entropy, summed over components, `[...]`."""

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """Return KL(params || other), summed over components, `[...]`."""


class Categorical:
    """Independent categorical components; parameters are their logits, one after the other."""

    def __init__(self, nvec: Sequence[int]) -> None:
        self.num_params = sum(nvec)
        self._shape = (len(nvec), max(nvec))
        # Unequal components are padded to a rectangle with a column that never wins.
        columns = np.full(self._shape, self.num_params)
        offset = 0
        for row, count in enumerate(nvec):
            columns[row, :count] = np.arange(offset, offset + count)
            offset += count
        self._ragged = len(set(nvec)) > 1
        self._columns = torch.from_numpy(columns)

    def _logits(self, params: Tensor) -> Tensor:
        if not self._ragged:
            return params.unflatten(-1, self._shape)
        padded = F.pad(params, (0, 1), value=_PAD_LOGIT)
        return padded[..., self._columns.to(params.device)]

    def sample(self, params: Tensor, generator: torch.Generator | None) -> Tensor:
        # Gumbel-max: -log of an exponential variate is a Gumbel variate.
        logits = self._logits(params)
        noise = torch.empty_like(logits).exponential_(generator=generator)
        noise.clamp_(min=torch.finfo(noise.dtype).tiny)
        return (logits - noise.log_()).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        return self._logits(params).argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        log_p = self._logits(params).log_softmax(-1)
        return log_p.gather(-1, action.long()[..., None])[..., 0].sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_p = self._logits(params).log_softmax(-1)
        return -(log_p.exp() * log_p).sum((-1, -2))

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        log_p = self._logits(params).log_softmax(-1)
        log_q = self._logits(other).log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum((-1, -2))


class Normal:
    """What the two continuous distributions share; parameters are the means, then log stds."""

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        self.num_params = 2 * len(low)
        low_, high_ = torch.tensor(low), torch.tensor(high)
        finite = torch.isfinite(low_) & torch.isfinite(high_)
        self._low, self._high = low_, high_
        self._middle = torch.where(finite, (low_ + high_) / 2, 0.0)
        self._half = torch.where(finite, (high_ - low_) / 2, 1.0)

    def _to(self, device: torch.device) -> None:
        if self._low.device != device:
            for name in ("_low", "_high", "_middle", "_half"):
                setattr(self, name, getattr(self, name).to(device))

    def _loc_and_log_std(self, params: Tensor) -> tuple[Tensor, Tensor]:
        self._to(params.device)
        loc, log_std = params.chunk(2, -1)
        return loc, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)

    def _noise(self, params: Tensor, generator: torch.Generator | None) -> Tensor:
        loc, log_std = self._loc_and_log_std(params)
        return loc + log_std.exp() * torch.empty_like(loc).normal_(generator=generator)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        loc_p, log_std_p = self._loc_and_log_std(params)
        loc_q, log_std_q = self._loc_and_log_std(other)
        log_ratio = log_std_p - log_std_q
        distance = ((loc_p - loc_q) * (-log_std_q).exp()).square()
        return (0.5 * ((2 * log_ratio).exp() + distance - 1) - log_ratio).sum(-1)


class TanhNormal(Normal):
    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__(low, high)
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        self._nodes = torch.tensor(nodes, dtype=torch.float32)
        self._weights = torch.tensor(weights / weights.sum(), dtype=torch.float32)

    def _squash(self, u: Tensor) -> Tensor:
        return self._middle + self._half * u.tanh().clamp(-_TANH_LIMIT, _TANH_LIMIT)

    def sample(self, params: Tensor, generator: torch.Generator | None) -> Tensor:
        return self._squash(self._noise(params, generator))

    def mode(self, params: Tensor) -> Tensor:
        return self._squash(self._loc_and_log_std(params)[0])

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        loc, log_std = self._loc_and_log_std(params)
        y = ((action - self._middle) / self._half).clamp(-_TANH_LIMIT, _TANH_LIMIT)
        u = y.atanh()
        log_density = _log_normal((u - loc) * (-log_std).exp()) - log_std
        return (log_density - self._half.log() - _log_tanh_slope(u)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        loc, log_std = self._loc_and_log_std(params)
        nodes, weights = self._nodes.to(params.device), self._weights.to(params.device)
        u = loc[..., None] + log_std.exp()[..., None] * nodes
        log_slope = (_log_tanh_slope(u) * weights).sum(-1)
        return (0.5 + _HALF_LOG_2PI + log_std + self._half.log() + log_slope).sum(-1)


class ClippedNormal(Normal):
    def sample(self, params: Tensor, generator: torch.Generator | None) -> Tensor:
        return self._clip(self._noise(params, generator))

    def mode(self, params: Tensor) -> Tensor:
        return self._clip(self._loc_and_log_std(params)[0])

    def _clip(self, u: Tensor) -> Tensor:
        return (self._middle + self._half * u).clamp(self._low, self._high)

    def _bounds(self, loc: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
        # Finite stand-ins for infinite bounds: an infinity would turn gradients into NaN.
        inverse_std = (-log_std).exp()
        low = ((self._low - self._middle) / self._half).clamp(min=-_FAR)
        high = ((self._high - self._middle) / self._half).clamp(max=_FAR)
        return (low - loc) * inverse_std, (high - loc) * inverse_std

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        loc, log_std = self._loc_and_log_std(params)
        z_low, z_high = self._bounds(loc, log_std)
        z = ((action - self._middle) / self._half - loc) * (-log_std).exp()
        log_p = _log_normal(z) - log_std - self._half.log()
        log_p = torch.where(action <= self._low, torch.special.log_ndtr(z_low), log_p)
        log_p = torch.where(action >= self._high, torch.special.log_ndtr(-z_high), log_p)
        return log_p.sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        # -sum P log P of the atoms, -integral p log p of the part between them.
        loc, log_std = self._loc_and_log_std(params)
        z_low, z_high = self._bounds(loc, log_std)
        log_below, log_above = torch.special.log_ndtr(z_low), torch.special.log_ndtr(-z_high)
        below, above = log_below.exp(), log_above.exp()
        inside = 1 - below - above
        second_moment = (
            inside + z_low * _log_normal(z_low).exp() - z_high * _log_normal(z_high).exp()
        )
        between = inside * (_HALF_LOG_2PI + log_std + self._half.log()) + 0.5 * second_moment
        return (between - below * log_below - above * log_above).sum(-1)


def _log_normal(z: Tensor) -> Tensor:
    return -0.5 * z.square() - _HALF_LOG_2PI


def _log_tanh_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) without cancellation."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))
