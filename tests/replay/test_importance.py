import numpy as np
import pytest

from hpcrl.replay.importance import (
    GlobalReplayStats,
    combine_summaries,
    importance_weights,
    one_buffer_weights,
    summarize_shard,
)
from hpcrl.replay.prioritized import PrioritizedSampler

ALPHA = 0.9
# Three shards, unequal in size and by a factor of 100 in mass; priorities correlate with the
# values to be averaged, as TD errors do with gradients.
SIZES = (50, 200, 20)
SCALES = (0.1, 1.0, 10.0)
SHARES = (1 / 3, 1 / 3, 1 / 3)


def make_shards():
    rng = np.random.default_rng(7)
    priorities = [scale * rng.exponential(size=n) for n, scale in zip(SIZES, SCALES, strict=True)]
    values = [p + rng.normal(size=len(p)) + 3.0 for p in priorities]
    shards = []
    for p in priorities:
        shard = PrioritizedSampler(len(p), ALPHA)
        shard.add(p)
        shards.append(shard)
    return shards, priorities, values


def stats_of(shards, shares=SHARES):
    pairs = zip(shards, shares, strict=True)
    return combine_summaries([summarize_shard(shard, share) for shard, share in pairs])


def sampled_estimate(shards, values, shares, num_draws, weight):
    """Weighted mean over draws, each shard giving its share, and its standard deviation."""
    rng = np.random.default_rng(8)
    estimate = variance = 0.0
    for shard, value, share in zip(shards, values, shares, strict=True):
        n = round(share * num_draws)
        slots = shard.sample(n, rng).slots
        estimate += share * np.mean(weight(shard, slots, share) * value[slots])
        slots = np.arange(shard.capacity)
        p, products = shard.probability(slots), weight(shard, slots, share) * value
        variance += share**2 * (p @ products**2 - (p @ products) ** 2) / n
    return estimate, np.sqrt(variance)


@pytest.mark.parametrize("shares", [SHARES, (0.5, 0.25, 0.25)])
def test_unequal_shards_estimate_the_same_mean_as_one_buffer(shares):
    """N = 300 000 draws, tolerance four standard deviations (computed in closed form)."""
    shards, _, values = make_shards()
    stats = stats_of(shards, shares)
    target = np.mean(np.concatenate(values))

    def weight(shard, slots, share):
        return importance_weights(share * shard.probability(slots), stats.size, exponent=1.0)

    def weight_two(shard, slots, share):
        return one_buffer_weights(shard.probability(slots), shard.mass, share, stats, 1.0)

    for function in (weight, weight_two):
        estimate, sigma = sampled_estimate(shards, values, shares, 300_000, function)
        assert abs(estimate - target) < 4.0 * sigma
        assert sigma < 0.02 * target  # tight enough to notice what the next test shows


def test_weights_from_the_shard_alone_would_be_wrong():
    """The same test has the power to reject weights that ignore the other shards."""
    shards, _, values = make_shards()
    target = np.mean(np.concatenate(values))

    def local_weight(shard, slots, share):
        return importance_weights(shard.probability(slots), shard.size, exponent=1.0)

    estimate, sigma = sampled_estimate(shards, values, SHARES, 300_000, local_weight)
    assert abs(estimate - target) > 20.0 * sigma


@pytest.mark.parametrize("exponent", [0.0, 0.4, 0.6, 1.0])
def test_one_buffer_weights_have_the_expectation_of_one_buffer_for_every_exponent(exponent):
    shards, priorities, values = make_shards()
    stats = stats_of(shards)
    value = np.concatenate(values)
    mass = np.concatenate(priorities) ** ALPHA
    q = mass / mass.sum()
    expected = np.sum(q * (len(q) * q) ** -exponent * value)  # one buffer holding everything
    total = 0.0
    for shard, v, share in zip(shards, values, SHARES, strict=True):
        p = shard.probability(np.arange(shard.capacity))
        total += share * np.sum(p * one_buffer_weights(p, shard.mass, share, stats, exponent) * v)
    assert total == pytest.approx(expected, rel=1e-12)


def test_both_weights_agree_with_one_shard():
    shards, _, _ = make_shards()
    stats = stats_of(shards[:1], (1.0,))
    p = shards[0].probability(np.arange(50))
    np.testing.assert_allclose(
        importance_weights(p, 50, 0.6), one_buffer_weights(p, shards[0].mass, 1.0, stats, 0.6)
    )
    np.testing.assert_allclose(importance_weights(p, 50, 0.6), (1 / (50 * p)) ** 0.6)


def test_the_maximum_over_all_shards_normalizes_every_weight_to_at_most_one():
    shards, _, _ = make_shards()
    stats = stats_of(shards)
    largest = 0.0
    for shard, share in zip(shards, SHARES, strict=True):
        p = share * shard.probability(np.arange(shard.capacity))
        weights = importance_weights(p, stats.size, 0.6, stats.max_weight(0.6))
        assert weights.max() <= 1.0 + 1e-12
        largest = max(largest, weights.max())
    assert largest == pytest.approx(1.0)


def test_stats_are_sums_and_maxima_over_the_shards():
    shards, priorities, _ = make_shards()
    stats = stats_of(shards)
    p = np.concatenate(priorities)
    assert stats.num_shards == 3
    assert stats.size == 270
    assert stats.mass == pytest.approx(np.sum(p**ALPHA))
    assert stats.mean_priority == pytest.approx(p.mean())
    assert stats.max_priority == p.max()


def test_an_empty_shard_contributes_nothing():
    empty = summarize_shard(PrioritizedSampler(4, ALPHA), 0.5)
    assert empty.sums.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert empty.maxima.tolist() == [0.0, 0.0]
    assert combine_summaries([empty]) == GlobalReplayStats(1, 0.0, 0, 0.0, 0.0, 0.0)
