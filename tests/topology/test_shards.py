"""Stretches of a flat vector, against a twin that deals the elements one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.topology.shards import shard_bounds


@given(size=st.integers(1, 400), data=st.data())
def test_every_element_is_in_one_stretch_and_lengths_differ_by_one_at_most(size, data):
    count = data.draw(st.integers(1, size))
    owners = [
        owner
        for owner, (first, last) in enumerate(shard_bounds(size, count))
        for _ in range(first, last)
    ]
    assert len(owners) == size
    assert owners == sorted(owners)  # contiguous, in order
    loads = [owners.count(owner) for owner in range(count)]
    # Dealing one element at a time to the emptiest server.
    dealt = [0] * count
    for _ in range(size):
        dealt[dealt.index(min(dealt))] += 1
    assert sorted(loads) == sorted(dealt)


@pytest.mark.parametrize("count", [0, 6])
def test_more_servers_than_parameters_are_refused(count):
    with pytest.raises(ValueError, match=f"5 parameters can't be shared by {count} learners"):
        shard_bounds(5, count)
