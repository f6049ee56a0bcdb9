import numpy as np
import pytest

from hpcrl.replay.prioritized import MAX_PRIORITY, PrioritizedSampler
from tests.replay.twins import NaiveSampler


def test_equals_a_naive_twin_under_random_operations():
    rng = np.random.default_rng(1)
    sampler, twin = PrioritizedSampler(13, 0.7, 1e-3), NaiveSampler(13, 0.7, 1e-3)
    given = [(0, 0)]  # every identity ever handed out
    for _ in range(500):
        operation = rng.integers(4)
        n = int(rng.integers(1, 6))
        priorities = rng.choice([0.0, 1e-9, 0.5, 3.0, 1e4], n)
        if operation == 0:
            eligible = rng.random(n) < 0.8
            slots, generations = sampler.add(priorities, eligible)
            twin.add(priorities, eligible)
            given += list(zip(slots.tolist(), generations.tolist(), strict=True))
        elif operation == 1:
            slots, generations = np.array([given[i] for i in rng.integers(0, len(given), n)]).T
            sampler.update(slots, generations, priorities)
            twin.update(slots, generations, priorities)
        elif operation == 2 and rng.random() < 0.3:
            slots = rng.permutation(13)[:n]
            sampler.remove(slots)
            twin.remove(slots)
        elif sampler.size:
            draw = sampler.sample(n, rng)
            np.testing.assert_allclose(draw.probability, twin.probabilities()[draw.slots])
            assert set(zip(draw.slots.tolist(), draw.generations.tolist(), strict=True)) <= {
                (item.slot, item.generation) for item in twin.items if item.live
            }
        assert sampler.check_valid() == (True, "")
        assert (sampler.size, sampler.num_stale) == (twin.size, twin.num_stale)
        if sampler.size:
            np.testing.assert_allclose(sampler.probability(np.arange(13)), twin.probabilities())
            live = [item.priority for item in twin.items if item.live]
            assert sampler.max_priority == max(live)
            assert sampler.priority_sum == pytest.approx(sum(live))
            positive = twin.probabilities()[twin.probabilities() > 0]
            assert sampler.min_probability == pytest.approx(positive.min())


def test_stale_write_back_never_lands_on_a_newer_item():
    sampler = PrioritizedSampler(4, 1.0)
    slots, generations = sampler.add([1.0, 1.0, 1.0, 1.0])
    new_slots, new_generations = sampler.add([5.0, 5.0])
    assert new_slots.tolist() == [0, 1]  # the oldest two were overwritten
    num_stale = sampler.update(slots, generations, np.full(4, 100.0))
    assert num_stale == sampler.num_stale == 2
    assert sampler.priority([0, 1, 2, 3]).tolist() == [5.0, 5.0, 100.0, 100.0]
    assert sampler.update(new_slots, new_generations, [7.0, 8.0]) == 0
    assert sampler.priority([0, 1]).tolist() == [7.0, 8.0]


def test_a_late_priority_does_not_bring_a_removed_item_back():
    sampler = PrioritizedSampler(4, 1.0)
    slots, generations = sampler.add([1.0, 1.0])
    sampler.remove([0])
    assert sampler.update(slots, generations, [9.0, 9.0]) == 1
    assert sampler.update([0, 3], [-1, -1], [9.0, 9.0]) == 2
    assert sampler.size == 1
    assert sampler.priority([0, 3]).tolist() == [0.0, 0.0]
    assert sampler.check_valid() == (True, "")


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_zero_priority_can_still_be_drawn(alpha):
    sampler = PrioritizedSampler(4, alpha, min_priority=1e-2)
    slots, generations = sampler.add([0.0, 1.0])
    sampler.update(slots, generations, [0.0, 0.0])
    drawn = sampler.sample(200, np.random.default_rng(0)).slots
    assert set(drawn.tolist()) == {0, 1}


def test_of_duplicate_items_the_last_priority_wins():
    sampler = PrioritizedSampler(4, 1.0)
    slots, generations = sampler.add([1.0, 1.0])
    sampler.update(slots[[0, 1, 0]], generations[[0, 1, 0]], [2.0, 3.0, 4.0])
    assert sampler.priority(slots).tolist() == [4.0, 3.0]
    assert sampler.mass == 7.0


@pytest.mark.parametrize("stratified", [False, True])
def test_draws_follow_the_closed_form_distribution(stratified):
    priorities = np.array([0.0, 0.1, 1.0, 2.0, 5.0, 1.0, 0.5])
    sampler = PrioritizedSampler(7, 0.9, min_priority=0.05)
    sampler.add(priorities)
    masses = np.maximum(priorities, 0.05) ** 0.9
    expected = masses / masses.sum()
    num_draws = 200_000
    rng = np.random.default_rng(2)
    draws = [sampler.sample(50, rng, stratified=stratified).slots for _ in range(num_draws // 50)]
    counts = np.bincount(np.concatenate(draws), minlength=7)
    # Four standard deviations of independent draws; stratified ones vary less.
    tolerance = 4.0 * np.sqrt(expected * (1 - expected) / num_draws)
    assert np.all(np.abs(counts / num_draws - expected) < tolerance)


def test_a_stratified_draw_takes_one_from_every_part_of_the_mass():
    sampler = PrioritizedSampler(8, 1.0)
    sampler.add(np.ones(8))
    for seed in range(20):
        drawn = sampler.sample(8, np.random.default_rng(seed), stratified=True).slots
        assert drawn.tolist() == list(range(8))


def test_draws_without_replacement_follow_successive_sampling():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = PrioritizedSampler(4, 1.0)
    sampler.add(p)
    num_draws = 40_000
    rng = np.random.default_rng(3)
    counts = np.zeros((4, 4))
    for _ in range(num_draws):
        first, second = sampler.sample(2, rng, replacement=False).slots
        counts[first, second] += 1
    expected = p[:, None] * p[None, :] / (1 - p[:, None])  # P(second | not first)
    np.fill_diagonal(expected, 0.0)
    tolerance = 4.0 * np.sqrt(expected * (1 - expected) / num_draws)
    assert np.all(np.abs(counts / num_draws - expected) <= tolerance)


def test_a_draw_without_replacement_leaves_the_priorities_as_they_were():
    sampler = PrioritizedSampler(50, 0.8)
    sampler.add(np.linspace(0, 3, 50))
    before = sampler.get_state()["masses"]
    drawn = sampler.sample(50, np.random.default_rng(0), replacement=False)
    assert sorted(drawn.slots.tolist()) == list(range(50))
    np.testing.assert_array_equal(sampler.get_state()["masses"], before)
    np.testing.assert_allclose(drawn.probability, before[drawn.slots] / before.sum())


def test_the_oldest_item_is_evicted_first():
    sampler = PrioritizedSampler(3, 1.0)
    for priority in (1.0, 2.0, 3.0, 4.0):
        sampler.add([priority])
    assert sorted(sampler.priority([0, 1, 2]).tolist()) == [2.0, 3.0, 4.0]
    assert sampler.generation([0, 1, 2]).tolist() == [3, 1, 2]


def test_the_age_of_a_priority_counts_draws_since_it_was_written():
    sampler = PrioritizedSampler(1, 1.0)
    rng = np.random.default_rng(0)
    slots, generations = sampler.add([1.0])
    for age in range(3):
        assert sampler.priority_age_draws(slots) == age
        sampler.sample(1, rng)
    sampler.update(slots, generations, [2.0])
    assert sampler.priority_age_draws(slots) == 0


@pytest.mark.parametrize("priority", [-1.0, np.nan, np.inf, 10 * MAX_PRIORITY])
def test_priorities_of_a_diverged_learner_are_refused(priority):
    sampler = PrioritizedSampler(4, 0.9)
    slots, generations = sampler.add([1.0])
    with pytest.raises(ValueError, match="priority"):
        sampler.update(slots, generations, [priority])
    with pytest.raises(ValueError, match="priority"):
        sampler.add([priority])
    assert sampler.check_valid() == (True, "")
    assert sampler.size == 1


def test_a_negative_zero_is_a_zero():
    sampler = PrioritizedSampler(4, 0.9, min_priority=0.25)
    slots, _ = sampler.add([-0.0, MAX_PRIORITY])
    assert sampler.priority(slots).tolist() == [0.25, MAX_PRIORITY]


def test_impossible_requests_are_refused():
    sampler = PrioritizedSampler(4, 0.9)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="cannot draw 1 items from 0"):
        sampler.sample(1, rng)
    sampler.add([1.0, 1.0])
    with pytest.raises(ValueError, match="cannot draw 3 items from 2"):
        sampler.sample(3, rng, replacement=False)
    with pytest.raises(ValueError, match="not defined"):
        sampler.sample(2, rng, replacement=False, stratified=True)
    with pytest.raises(ValueError, match="5 items do not fit into 4"):
        sampler.add(np.ones(5))
    with pytest.raises(ValueError, match="exponent"):
        PrioritizedSampler(4, -0.1)
    with pytest.raises(ValueError, match="never be drawn again"):
        PrioritizedSampler(4, 0.5, min_priority=0.0)
    with pytest.raises(ValueError, match="were added already"):
        sampler.start_at(3)


def test_state_is_a_copy_and_restores_equal_draws():
    sampler = PrioritizedSampler(20, 0.6)
    sampler.add(np.linspace(0, 5, 30)[:20])
    sampler.add([9.0, 8.0])
    state = sampler.get_state()
    other = PrioritizedSampler(20, 0.6)
    other.set_state(state)
    one = sampler.sample(64, np.random.default_rng(4))
    sampler.update(one.slots, one.generations, np.zeros(64))
    two = other.sample(64, np.random.default_rng(4))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    assert other.check_valid() == (True, "")


def test_bytes_are_predicted():
    assert PrioritizedSampler(777, 0.9).nbytes == PrioritizedSampler.bytes_for(777)
