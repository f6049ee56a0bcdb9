"""Importance weights that make L replay shards behave as one prioritized buffer.

Learner i holds a shard with N_i items of total mass M_i (masses m_j = p_j**alpha) and gives
the share s_i of every global batch (b_i of sum_i b_i draws; 1/L when all are equal), drawn
from its own shard only. Item j of shard i is therefore drawn with the true global probability

    P_j = s_i m_j / M_i

whereas one buffer holding everything, with N = sum_i N_i and M = sum_i M_i, would draw it
with Q_j = m_j / M. A mean over the global batch of w_j g_j has the expectation
sum_j P_j w_j g_j. Two weights follow:

- `importance_weights`: w_j = (N P_j)**-beta, arXiv:1511.05952 §3.4 with the true P_j. For
  beta = 1 the expectation is the mean of g over all N items, whatever the shards. For
  beta < 1 some dependence on how items are spread over shards remains: an item of a shard
  with little mass counts more.
- `one_buffer_weights`: w_j = (Q_j / P_j) (N Q_j)**-beta. The first factor, M_i / (s_i M),
  removes the effect of sharding in full, the second is the weight that one buffer would use:
  the expectation equals that of one buffer for every beta. Both weights agree for beta = 1,
  and for shards of equal mass per share.

Nothing here communicates. Every learner makes a `ShardSummary`; the caller all-reduces its
two vectors by sum and by maximum and hands the result to `GlobalReplayStats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.replay.prioritized import PrioritizedSampler

Float64 = NDArray[np.float64]


class ShardSummary(NamedTuple):
    """What one learner contributes to an agreement.

    Attributes:
      sums: `<float64>[4]`, to be all-reduced by sum: shards (1), mass, size, priority sum.
      maxima: `<float64>[2]`, to be all-reduced by maximum: priority, 1 / P of the item of
        this shard that is least likely to be drawn.
    """

    sums: Float64
    maxima: Float64


@dataclass(frozen=True)
class GlobalReplayStats:
    """All shards taken together, the same on every learner.

    Attributes:
      num_shards: learners that contributed.
      mass: sum of p**alpha over all items.
      size: number of items that can be drawn.
      mean_priority: mean of p over all items, 0 when there is none.
      max_priority: largest p.
      max_inverse_probability: largest 1 / P over all items, with the true global P.
    """

    num_shards: int
    mass: float
    size: int
    mean_priority: float
    max_priority: float
    max_inverse_probability: float

    @staticmethod
    def from_reduced(sums: Float64, maxima: Float64) -> GlobalReplayStats:
        """Build the stats from the all-reduced vectors of `ShardSummary`."""
        num_shards, mass, size, priority_sum = (float(x) for x in sums)
        return GlobalReplayStats(
            num_shards=round(num_shards),
            mass=mass,
            size=round(size),
            mean_priority=priority_sum / size if size else 0.0,
            max_priority=float(maxima[0]),
            max_inverse_probability=float(maxima[1]),
        )

    def max_weight(self, exponent: float) -> float:
        """Largest `importance_weights` that any item of any shard can have."""
        return float((self.max_inverse_probability / self.size) ** exponent)


def summarize_shard(sampler: PrioritizedSampler, draw_share: float) -> ShardSummary:
    """Summarize one shard.

    Args:
      sampler: the shard's priorities.
      draw_share: this learner's draws per global batch over all draws of the batch.
    """
    smallest = draw_share * sampler.min_probability
    return ShardSummary(
        sums=np.array([1.0, sampler.mass, sampler.size, sampler.priority_sum]),
        maxima=np.array([sampler.max_priority, 1.0 / smallest if smallest else 0.0]),
    )


def combine_summaries(summaries: Sequence[ShardSummary]) -> GlobalReplayStats:
    """Combine the summaries of all shards held in one process; an all-reduce does the same."""
    return GlobalReplayStats.from_reduced(
        np.sum([summary.sums for summary in summaries], axis=0),
        np.max([summary.maxima for summary in summaries], axis=0),
    )


def importance_weights(
    probability: Float64, num_items: int, exponent: float, max_weight: float | None = None
) -> Float64:
    """Return (num_items * probability)**-exponent / max_weight.

    Args:
      probability: `<float64>[B]`, true probability P of each drawn item per global draw: the
        draw share times the probability within the shard.
      num_items: items in all shards together, N.
      exponent: beta, 0 (no correction) to 1 (full correction).
      max_weight: normalizer; it has to be the same on every learner (an all-reduced maximum,
        of the batch or of the buffer), otherwise the learners weigh their shards differently.
        None means 1.

    Returns:
      `<float64>[B]`.
    """
    weights = (num_items * probability) ** -exponent
    return weights if max_weight is None else weights / max_weight


def one_buffer_weights(
    local_probability: Float64,
    shard_mass: float,
    draw_share: float,
    stats: GlobalReplayStats,
    exponent: float,
    max_weight: float | None = None,
) -> Float64:
    """Return (Q / P) (N Q)**-exponent / max_weight; see the module's docstring.

    Args:
      local_probability: `<float64>[B]`, m_j / M_i, as the shard's draw gives it.
      shard_mass: M_i of this shard.
      draw_share: s_i of this shard.
      stats: the global mass and size, at most as old as the priorities' drift allows.
      exponent: beta, 0 to 1.
      max_weight: normalizer, the same on every learner; None means 1.

    Returns:
      `<float64>[B]`.
    """
    mass_share = shard_mass / stats.mass
    weights = importance_weights(local_probability * mass_share, stats.size, exponent, max_weight)
    return weights * (mass_share / draw_share)
