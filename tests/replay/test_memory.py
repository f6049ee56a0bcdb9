import numpy as np
import pytest

from hpcrl.replay.memory import (
    check_capacity,
    check_memory,
    largest_capacity,
    replay_bytes,
    sample_bytes,
)
from hpcrl.replay.storage import ReplayShard
from tests.replay.test_layout import GEOMETRIES
from tests.replay.twins import counting_layout, counting_unroll


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("capacity", "num_streams"), [(9, 1), (5000, 3)])
def test_predicted_bytes_are_what_the_shard_allocates(geometry, capacity, num_streams):
    layout = counting_layout(**geometry)
    shard = ReplayShard(layout, capacity, num_streams, alpha=0.9)
    assert replay_bytes(layout, capacity, num_streams) == shard.nbytes
    buffers = shard.make_buffers(3)
    arrays = [*buffers.rows.values(), *buffers.items.values()]
    assert sample_bytes(layout, 3) == sum(array.nbytes for array in arrays)


def test_a_compressed_shard_stays_within_its_predicted_bytes(monkeypatch):
    monkeypatch.setattr("hpcrl.replay.storage.MIN_COMPRESSED_BYTES", 16)
    monkeypatch.setattr("hpcrl.replay.memory.MIN_COMPRESSED_BYTES", 16)
    layout = counting_layout(unroll_length=8)
    shard = ReplayShard(layout, 30, 2, alpha=0.9, compression="zlib", compressed_bytes_limit=1000)
    for k in range(40):
        shard.add(counting_unroll(layout, 0, 0, k))
    predicted = replay_bytes(layout, 30, 2, compressed_bytes_limit=1000)
    assert 0.9 * predicted < shard.nbytes <= predicted


@pytest.mark.parametrize("num_bytes", [0, 30_000, 1_000_000])
def test_the_largest_capacity_fits_and_one_more_does_not(num_bytes):
    layout = counting_layout(unroll_length=8, burn_in=2)
    capacity = largest_capacity(layout, 2, num_bytes)
    if capacity:
        assert replay_bytes(layout, capacity, 2) <= num_bytes
    assert replay_bytes(layout, capacity + 1, 2) > num_bytes
    assert (capacity > 0) == (num_bytes > 0)


def test_the_error_names_the_bytes_needed_the_bytes_there_and_the_largest_capacity():
    layout = counting_layout(unroll_length=8, burn_in=2)
    needed = replay_bytes(layout, 10_000, 2)
    assert check_memory(layout, 10_000, 2, bytes_available=needed) == needed
    with pytest.raises(MemoryError) as caught:
        check_memory(layout, 10_000, 2, bytes_available=needed // 2, buffer_bytes=100)
    text = str(caught.value)
    assert f"needs {needed + 100} bytes" in text
    assert f"has {needed // 2} bytes" in text
    fits = largest_capacity(layout, 2, needed // 2 - 100)
    assert f"largest capacity that fits is {fits} unrolls" in text
    assert 4950 <= fits <= 5000  # about half the bytes, half the unrolls


def test_a_capacity_must_hold_min_size_and_a_batch_besides_the_unrolls_that_only_serve_others():
    layout = counting_layout(unroll_length=8, burn_in=2)
    check_capacity(layout, 100, num_streams=10, min_size=60, batch=30)
    with pytest.raises(ValueError, match=r"100 unrolls .* leaves 90 items .* at least 101"):
        check_capacity(layout, 100, num_streams=10, min_size=60, batch=31)


def test_a_capacity_that_passes_is_reached_in_the_worst_case():
    layout = counting_layout(unroll_length=8, burn_in=2)
    shard = ReplayShard(layout, 12, num_streams=4, alpha=0.9)
    check_capacity(layout, 12, num_streams=4, min_size=6, batch=2)
    sizes = []
    for k in range(10):
        for env in np.random.default_rng(k).permutation(4):
            shard.add(counting_unroll(layout, int(env), 0, k))
            sizes.append(shard.size)
    assert min(sizes[12:]) == 8
