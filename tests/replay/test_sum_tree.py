import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.replay.sum_tree import MAX_VALUE, SumTree
from tests.replay.twins import NaiveSumTree

SHAPES = [(2, 1), (3, 4), (4, 16), (32, 4096)]


@pytest.mark.parametrize(("fan_out", "top_size"), SHAPES)
@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 65, 300])
def test_equals_a_naive_twin_under_random_operations(capacity, fan_out, top_size):
    rng = np.random.default_rng(capacity)
    tree, twin = SumTree(capacity, fan_out, top_size), NaiveSumTree(capacity)
    for _ in range(60):
        # Small integers as floats: every sum is exact, so the twins agree to the last bit.
        indices = rng.integers(0, capacity, rng.integers(0, 20))
        values = rng.integers(0, 4, len(indices)).astype(float)
        tree.set(indices, values)
        twin.set(indices, values)
        assert tree.check_valid() == (True, "")
        assert tree.total() == twin.total()
        np.testing.assert_array_equal(tree.values, twin.values)
        if twin.total():
            targets = np.arange(0, twin.total(), 0.5)
            expected = [twin.query(target) for target in targets]
            np.testing.assert_array_equal(tree.query(targets), expected)


def test_boundary_values_belong_to_the_interval_that_starts_there():
    tree = SumTree(6, fan_out=2, top_size=1)
    tree.set(range(6), [0.0, 2.0, 0.0, 3.0, 1.0, 0.0])
    # Intervals: [0, 2) is 1, [2, 5) is 3, [5, 6) is 4.
    targets = [0.0, np.nextafter(2, 0), 2.0, np.nextafter(5, 0), 5.0, np.nextafter(6, 0)]
    assert tree.query(targets).tolist() == [1, 1, 3, 3, 4, 4]


def test_targets_from_the_total_up_are_clamped_to_the_last_positive_value():
    tree = SumTree(6, fan_out=2, top_size=1)
    tree.set(range(6), [0.0, 2.0, 0.0, 3.0, 1.0, 0.0])
    assert tree.query([6.0, 1e9]).tolist() == [4, 4]


def test_uniform_numbers_next_to_one_draw_the_last_positive_value():
    tree = SumTree(6, fan_out=2, top_size=1)
    tree.set(range(6), [0.0, 2.0, 0.0, 3.0, 0.1, 0.0])
    # Intervals end at 2 / 5.1, 5 / 5.1 and 1.
    uniforms = np.array([0.0, 0.39, 0.4, 0.98, 0.981, np.nextafter(1.0, 0.0), 1.0])
    indices, values = tree.draw(uniforms)
    assert indices.tolist() == [1, 1, 3, 3, 4, 4, 4]
    assert values.tolist() == [2.0, 2.0, 3.0, 3.0, 0.1, 0.1, 0.1]


def test_a_quick_draw_that_hits_a_zero_is_repeated_exactly():
    tree = SumTree(8, fan_out=4, top_size=2)
    tree.set(range(8), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    tree._triangle[:] = 1.0  # running sums as wrong as they can be: the first child always wins
    indices, values = tree.draw(np.array([0.1, 0.3, 0.6, 0.9]))
    assert indices.tolist() == [1, 3, 5, 7]
    assert values.tolist() == [1.0] * 4


values_of_any_size = st.lists(
    st.one_of(st.just(0.0), st.floats(0.0, 1e30), st.floats(1e-300, 1e-10), st.just(5e-324)),
    min_size=1,
    max_size=70,
)


@settings(max_examples=300, deadline=None)
@given(values=values_of_any_size, shape=st.sampled_from(SHAPES), fraction=st.floats(0.0, 1.0))
def test_an_index_with_value_zero_is_never_returned(values, shape, fraction):
    tree = SumTree(len(values), *shape)
    tree.set(np.arange(len(values)), values)
    if not any(values):
        with pytest.raises(ValueError, match="every value is zero"):
            tree.query([0.0])
        return
    total = tree.total()
    edges = np.concatenate([[0.0], np.cumsum(values)])
    targets = np.concatenate([edges, np.nextafter(edges, 0.0), np.nextafter(edges, np.inf)])
    drawn = tree.query(np.append(targets, [total, np.nextafter(total, 0), fraction * total]))
    assert np.all(tree.get(drawn) > 0.0)
    indices, values = tree.draw(np.append(np.minimum(targets / total, 1.0), fraction))
    assert np.all(values > 0.0)
    np.testing.assert_array_equal(tree.get(indices), values)


def test_a_target_stays_in_its_node_when_the_nodes_values_add_up_to_less():
    """Summed one after the other, 32 numbers may give less than the node's recorded sum."""
    values = np.random.default_rng(0).random((100, 32))
    values[:, 0] = 0.0  # what a draw that ran past the end of its node would return
    tree = SumTree(3200, fan_out=32, top_size=100)
    tree.set(np.arange(3200), values.ravel())
    ends = np.cumsum(values.sum(axis=1))
    drawn = tree.query(np.nextafter(ends, 0.0))
    np.testing.assert_array_equal(drawn // 32, np.arange(100))
    assert np.all(tree.get(drawn) > 0.0)
    assert np.any(np.cumsum(values, axis=1)[:, -1] < values.sum(axis=1))  # it does happen


def test_rounding_does_not_accumulate_over_updates():
    tree = SumTree(100, fan_out=2, top_size=1)
    rng = np.random.default_rng(0)
    for _ in range(300):
        tree.set(rng.integers(0, 100, 10), 10.0 ** rng.uniform(-10, 10, 10))
    tree.set(np.arange(100), np.full(100, 0.25))
    assert tree.total() == 25.0


def test_of_duplicate_indices_the_last_value_wins():
    tree = SumTree(8, fan_out=2, top_size=1)
    tree.set([3, 5, 3], [1.0, 2.0, 4.0])
    assert tree.get([3, 5]).tolist() == [4.0, 2.0]
    assert tree.total() == 6.0


@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf, 2 * MAX_VALUE])
def test_values_that_would_poison_the_total_are_refused(value):
    tree = SumTree(4)
    tree.set([0], [1.0])
    with pytest.raises(ValueError, match="outside"):
        tree.set([1, 2], [1.0, value])
    assert tree.total() == 1.0


@pytest.mark.parametrize("index", [-1, 4])
def test_indices_do_not_wrap_around(index):
    tree = SumTree(4)
    with pytest.raises(IndexError, match="outside"):
        tree.set([0, index], [1.0, 1.0])
    with pytest.raises(IndexError, match="outside"):
        tree.get([index])


def test_state_is_a_copy_and_restores():
    tree = SumTree(50, fan_out=4, top_size=4)
    tree.set(np.arange(50), np.arange(50.0))
    state = tree.get_state()
    tree.set([10], [0.0])
    assert state["values"][10] == 10.0
    other = SumTree(50, fan_out=4, top_size=4)
    other.set_state(state)
    state["values"][:] = 0.0
    np.testing.assert_array_equal(other.values, np.arange(50.0))
    assert other.check_valid() == (True, "")
    with pytest.raises(ValueError, match="capacity 7"):
        SumTree(7).set_state(state)


def test_values_cannot_be_written_around_the_tree():
    with pytest.raises(ValueError, match="read-only"):
        SumTree(3).values[0] = 1.0


@pytest.mark.parametrize(("fan_out", "top_size"), SHAPES)
def test_bytes_are_predicted(fan_out, top_size):
    for capacity in (1, 100, 5000):
        tree = SumTree(capacity, fan_out, top_size)
        assert tree.nbytes == SumTree.bytes_for(capacity, fan_out, top_size)


@pytest.mark.parametrize("arguments", [(0,), (4, 1), (4, 2, 0)])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ValueError, match="sum tree: need"):
        SumTree(*arguments)
