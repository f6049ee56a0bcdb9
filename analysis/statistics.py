"""Statistics over few runs and over many episodes.

The interquartile mean, its stratified bootstrap and the probability of improvement are those of
Agarwal et al. 2021 (arXiv 2108.13264), section 4; the package rliable has them, too, but brings
statsmodels, arch, scipy and seaborn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]


class Interval(NamedTuple):
    """An estimate and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def iqm(values: Floats) -> Floats:
    """Return the mean of the middle half along the last axis, `[..., n]` to `[...]`.

    The lowest and highest floor(n/4) values are left out, as in a 25 % trimmed mean.
    """
    count = values.shape[-1]
    cut = count // 4
    middle: Floats = np.sort(values, axis=-1)[..., cut : count - cut].mean(-1)
    return middle


def mean(values: Floats) -> Floats:
    """Return the mean along the last axis."""
    result: Floats = values.mean(-1)
    return result


def bootstrap(
    samples: ArrayLike,
    statistic: Statistic = mean,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return a statistic of independent samples `[n]` and its percentile bootstrap interval.

    Raises:
      ValueError: there is no sample.
    """
    values = np.asarray(samples, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"bootstrap takes samples [n] with n > 0, got shape {values.shape}")
    resampled = _resample(values, statistic, resamples, np.random.default_rng(seed))
    return _interval(float(statistic(values)), resampled, confidence)


def bootstrap_difference(
    first: ArrayLike,
    second: ArrayLike,
    statistic: Statistic = mean,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return statistic(second) - statistic(first) of independent samples and its interval."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    generator = np.random.default_rng(seed)
    difference = _resample(b, statistic, resamples, generator) - _resample(
        a, statistic, resamples, generator
    )
    return _interval(float(statistic(b) - statistic(a)), difference, confidence)


def probability_of_improvement(first: ArrayLike, second: ArrayLike) -> float:
    """Return P(second > first), ties counted half (the Mann-Whitney statistic)."""
    a, b = np.asarray(first, np.float64)[:, None], np.asarray(second, np.float64)[None]
    return float((b > a).mean() + 0.5 * (b == a).mean())


def _resample(
    values: Floats, statistic: Statistic, resamples: int, generator: np.random.Generator
) -> Floats:
    # In blocks, so that many episodes don't need resamples times their memory.
    block = max(1, 2_000_000 // len(values))
    parts = []
    for first in range(0, resamples, block):
        size = (min(block, resamples - first), len(values))
        parts.append(statistic(values[generator.integers(0, len(values), size)]))
    return np.concatenate(parts)


def _interval(value: float, resampled: Floats, confidence: float) -> Interval:
    tail = 50 * (1 - confidence)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def on_grid(curves: Sequence[tuple[Floats, Floats]], points: int = 100) -> tuple[Floats, Floats]:
    """Interpolate curves (x, y) to the grid that all of them cover.

    Returns:
      `[points]` grid and `[len(curves), points]` values.

    Raises:
      ValueError: the curves share no part of the x axis.
    """
    low = max(float(x[0]) for x, _ in curves)
    high = min(float(x[-1]) for x, _ in curves)
    if not low <= high:
        raise ValueError(f"the curves share no part of the x axis: {low} to {high}")
    grid = np.linspace(low, high, points)
    return grid, np.array([np.interp(grid, x, y) for x, y in curves])
