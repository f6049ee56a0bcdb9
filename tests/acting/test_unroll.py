"""Assembly of overlapping unrolls, against a list per environment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.acting.unroll import UnrollStore
from hpcrl.comm.wire import row_fields, unroll_layout
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf

SPEC = EnvSpec(
    "test",
    {
        "image": ObservationLeaf(ArraySpec((2, 3), "uint8"), stack=3),
        "vector": ObservationLeaf(ArraySpec((4,), "float32")),
    },
    ActionSpec((ActionPart("discrete", (5, 2)),)),
)
BEHAVIOUR = {"log_prob": ArraySpec((), "float32")}
CORE_SIZE = 2
FIELDS = row_fields(SPEC, BEHAVIOUR)


def random_row(rng):
    """One row of every field, its state and its prefix, all random."""
    row = {
        name: rng.integers(0, 2, spec.shape).astype(bool)
        if spec.dtype == "bool"
        else rng.integers(0, 200, spec.shape).astype(spec.dtype)
        for name, spec in FIELDS.items()
    }
    state = rng.normal(size=CORE_SIZE).astype(np.float32)
    return row, state, rng.integers(0, 200, (2, 2, 3)).astype(np.uint8)


class Twin:
    """Everything that one environment gave since its last restart; unrolls are slices of it."""

    def __init__(self, env_id, run_id=0):
        self.env_id, self.run_id = env_id, run_id
        self.steps, self.taken = [], 0

    def complete(self, unroll_steps):
        """The next unroll by field, None while it is not complete."""
        first = self.taken * unroll_steps
        part = self.steps[first : first + unroll_steps + 1]
        if len(part) <= unroll_steps:
            return None
        unroll = {name: np.stack([row[name] for row, _, _ in part]) for name in FIELDS}
        header = {"env_id": self.env_id, "run_id": self.run_id, "unroll_index": self.taken}
        self.taken += 1
        return {**header, "core_state": part[0][1], "prefix:image": part[0][2], **unroll}


class Pair:
    """A store and its twins, fed alike."""

    def __init__(self, num_rows, unroll_steps, seed=0):
        self.steps = unroll_steps
        self.env_ids = np.arange(num_rows, dtype=np.int64) * 7 + 100
        self.layout = unroll_layout(SPEC, BEHAVIOUR, unroll_steps, CORE_SIZE)
        self.store = UnrollStore(self.layout, unroll_steps, self.env_ids)
        self.twins = [Twin(env_id) for env_id in self.env_ids]
        self.rng = np.random.default_rng(seed)

    def discard(self, ids):
        run_ids = self.rng.integers(0, 2**40, len(ids))
        self.store.discard(np.array(ids, np.intp), run_ids)
        for row, run_id in zip(ids, run_ids, strict=True):
            self.twins[row] = Twin(self.env_ids[row], run_id)

    def append(self, ids):
        """Append random rows; return the complete unrolls by field, as store and twins see them."""
        rows, states, prefixes = zip(*(random_row(self.rng) for _ in ids), strict=True)
        batch = {name: np.stack([row[name] for row in rows]) for name in FIELDS}
        index = np.array(ids, np.intp)
        complete = self.store.append(
            index, batch, np.stack(states), {"prefix:image": np.stack(prefixes)}
        )
        for row, *step in zip(ids, rows, states, prefixes, strict=True):
            self.twins[row].steps.append(step)
        expected = {row: self.twins[row].complete(self.steps) for row in ids}
        expected = {row: unroll for row, unroll in expected.items() if unroll is not None}
        assert complete.tolist() == list(expected)
        got = []
        if len(complete):
            views = self.layout.views(self.store.take(complete))
            got = [{name: view[i] for name, view in views.items()} for i in range(len(complete))]
        return got, list(expected.values())


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 4), unroll_steps=st.integers(1, 4))
def test_equals_a_list_per_environment_under_random_appends_and_restarts(
    data, num_rows, unroll_steps
):
    pair = Pair(num_rows, unroll_steps, seed=data.draw(st.integers(0, 2**16)))
    some = st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=num_rows, unique=True)
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.integers(0, 9)) == 0:
            pair.discard(data.draw(some))
        assert_equal(*pair.append(data.draw(some)))


def test_trap02_consecutive_unrolls_share_exactly_one_row():
    pair = Pair(1, 3)
    unrolls = [unroll for _ in range(10) for unroll in pair.append([0])[0]]
    # 10 rows: unrolls of rows 0-3, 3-6 and 6-9.
    assert [int(unroll["unroll_index"]) for unroll in unrolls] == [0, 1, 2]
    given_rows = np.stack([row["obs:vector"] for row, _, _ in pair.twins[0].steps])
    for index, unroll in enumerate(unrolls):
        np.testing.assert_array_equal(unroll["obs:vector"], given_rows[3 * index : 3 * index + 4])


def test_trap03_stored_state_and_prefix_are_those_before_row_0():
    pair = Pair(1, 3)
    unrolls = [unroll for _ in range(10) for unroll in pair.append([0])[0]]
    for index, unroll in enumerate(unrolls):
        _, state, prefix = pair.twins[0].steps[3 * index]
        np.testing.assert_array_equal(unroll["core_state"], state)
        np.testing.assert_array_equal(unroll["prefix:image"], prefix)


@pytest.mark.parametrize("rows_before", [1, 2, 3, 4, 5])
def test_trap11_partial_unroll_of_a_restarted_environment_is_discarded(rows_before):
    pair = Pair(2, 3)
    for _ in range(rows_before):
        pair.append([0, 1])
    pair.discard([0])
    after = [unroll for _ in range(4) for unroll in pair.append([0])[0]]
    assert len(after) == 1
    assert int(after[0]["unroll_index"]) == 0
    assert int(after[0]["run_id"]) == pair.twins[0].run_id
    expected = np.stack([row["obs:vector"] for row, _, _ in pair.twins[0].steps])
    np.testing.assert_array_equal(after[0]["obs:vector"], expected)
    # The other environment goes on where it was.
    assert_equal(*pair.append([1]))


def test_taken_unrolls_do_not_change_when_the_store_goes_on():
    pair = Pair(1, 2)
    for _ in range(2):
        pair.append([0])
    got, _ = pair.append([0])
    before = {name: array.copy() for name, array in got[0].items()}
    for _ in range(5):
        pair.append([0])
    assert_equal(got, [before])
