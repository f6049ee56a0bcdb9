"""A shard is written while it goes on; the file is that of the moment when it began."""

import threading

import numpy as np
import pytest

from hpcrl.replay import background_write
from hpcrl.replay.background_write import BackgroundWrite, background_bytes
from hpcrl.replay.files import load_shards
from hpcrl.replay.shard_writer import ShardWriter, record_dtype, save_shard
from tests.replay.test_files import fill, identities, make_shard
from tests.replay.test_storage import assert_sample_is_right
from tests.replay.twins import counting_unroll


@pytest.fixture
def gate(monkeypatch):
    """The disk takes nothing until it is opened."""
    gate, write = threading.Event(), ShardWriter.write

    def gated(self, records):
        assert gate.wait(20)
        write(self, records)

    monkeypatch.setattr(ShardWriter, "write", gated)
    yield gate
    gate.set()


def small_chunks(monkeypatch, shard, records):
    monkeypatch.setattr(
        background_write, "_CHUNK_BYTES", records * record_dtype(shard.layout).itemsize
    )


def stored(path, capacity=30):
    shard = make_shard(capacity=capacity)
    report = load_shards([path], shard)
    assert report.errors == ()
    assert shard.check_valid() == (True, "")
    return shard, [(u.stream_id, u.unroll_index) for u in shard.unrolls()]


@pytest.mark.parametrize("compression", ["none", "zlib"])
@pytest.mark.parametrize("records", [1, 3, 100])
def test_of_a_shard_that_rests_it_is_the_same_file(tmp_path, monkeypatch, compression, records):
    shard = fill(make_shard(compression=compression), envs=(0, 1, 2), num_unrolls=5)
    small_chunks(monkeypatch, shard, records)
    write = BackgroundWrite(shard, tmp_path / "new" / "shard")
    write.wait()
    num_bytes = save_shard(shard, tmp_path / "plain")
    assert (write.error, write.num_bytes, write.num_unrolls) == (None, num_bytes, 10)
    assert (tmp_path / "new" / "shard").read_bytes() == (tmp_path / "plain").read_bytes()


def test_unrolls_that_come_later_are_not_in_it_and_those_given_up_first_are_missed(
    tmp_path, monkeypatch, gate
):
    shard = fill(make_shard(capacity=12), envs=(0, 1, 2), num_unrolls=4)
    small_chunks(monkeypatch, shard, 1)
    before = [(u.stream_id, u.unroll_index) for u in shard.unrolls()]
    write = BackgroundWrite(shard, tmp_path / "shard")
    write.feed(10.0)  # copies what the thread has room for: one taken, three queued
    while write._next < 4:
        write.feed(10.0)
    copied = write._next
    assert copied == 4
    for env in (0, 1, 2) * 2:  # pushes out six, two of them not copied yet
        shard.add(counting_unroll(shard.layout, env, 0, 4, [50.0]))
    gate.set()
    write.wait()
    assert write.error is None
    assert write.missed_unrolls == 2
    restored, found = stored(tmp_path / "shard")
    assert found == before[:4] + before[6:]
    assert_sample_is_right(restored.layout, restored.sample(64, np.random.default_rng(0)))
    # Nothing that could not be drawn from the shard itself can be drawn from the file.
    assert set(identities(restored)) <= set(identities(fill(make_shard(12), (0, 1, 2), 4)))


def test_it_never_holds_more_than_its_few_chunks(tmp_path, monkeypatch, gate):
    shard = fill(make_shard(capacity=30), envs=(0, 1, 2), num_unrolls=10)
    small_chunks(monkeypatch, shard, 2)
    write = BackgroundWrite(shard, tmp_path / "shard")
    while write._next < 2 * 4:
        write.feed(1.0)
    for _ in range(100):
        write.feed(1.0)
    record_bytes = record_dtype(shard.layout).itemsize
    # The chunk that the thread holds, three in the queue, none of the next one.
    assert write._next == 2 * 4
    assert background_bytes(shard.layout) == 5 * 2 * record_bytes
    gate.set()
    write.wait()
    assert len(stored(tmp_path / "shard")[1]) == 30


def test_one_call_copies_for_as_long_as_it_may_and_no_longer(tmp_path):
    shard = fill(make_shard(capacity=30), envs=(0, 1, 2), num_unrolls=10)
    write = BackgroundWrite(shard, tmp_path / "shard")
    write.feed(0.0)
    assert write._next == 1
    write.wait()
    assert len(stored(tmp_path / "shard")[1]) == 30


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self, records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "write", full)
    write = BackgroundWrite(fill(make_shard(), (0, 1), 5), tmp_path / "shard")
    write.wait()
    assert write.error == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_write_leaves_nothing(tmp_path, monkeypatch, gate):
    shard = fill(make_shard(capacity=30), envs=(0, 1, 2), num_unrolls=10)
    small_chunks(monkeypatch, shard, 1)
    write = BackgroundWrite(shard, tmp_path / "shard")
    write.feed(1.0)
    gate.set()
    write.cancel()
    assert write.error == "cancelled"
    assert list(tmp_path.iterdir()) == []
