import sys
import types
import zlib

import numpy as np
import pytest

from hpcrl.compression import available_codecs, make_codec
from hpcrl.ops.frame_stack import stack_frames
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.storage import ReplayShard
from hpcrl.specs import ArraySpec
from tests.replay.test_layout import GEOMETRIES
from tests.replay.twins import (
    STARTS_EVERY,
    NaiveShard,
    counting_layout,
    counting_row,
    counting_unroll,
    item_steps,
)


def identity_of(shard, slots):
    """Who lives in each slot, by drawing until everybody has come up."""
    found: dict[int, tuple[int, ...]] = {}
    rng = np.random.default_rng(0)
    while len(found) < shard.size:
        sample = shard.sample(64, rng)
        for slot, identity in zip(sample.slots, sample.items["identity"], strict=True):
            found[int(slot)] = tuple(identity.tolist())
    return [found[slot] for slot in slots]


def assert_sample_is_right(layout, sample):
    """Compare every row, prefix and item with what the counting stream says."""
    for b, (env, run, k, m) in enumerate(sample.items["identity"].tolist()):
        first, _, end = item_steps(layout, k, m)
        steps = range(first + layout.stack_prefix, end + 1)
        assert sample.valid[:, b].tolist() == [step >= 0 for step in steps]
        for t, step in enumerate(steps):
            row = counting_row(env, run, step)
            for path in layout.rows:
                expected = row[path] if step >= 0 else np.zeros_like(row[path])
                np.testing.assert_array_equal(sample.rows[path][t, b], expected)
        np.testing.assert_array_equal(sample.items["core_state"][b], np.array([env, run, k]) + 0.25)
        if layout.stack_prefix:
            assert_stacks_are_right(layout, sample, b, env, run, steps)


def assert_stacks_are_right(layout, sample, b, env, run, steps):
    """What the network saw: the last K frames of the episode, newest last."""
    stacks = stack_frames(sample.rows["frame"], sample.prefixes["frame"], sample.rows["start"])
    depth = layout.stacks["frame"]
    assert stacks.shape[2] == depth
    for t, step in enumerate(steps):
        episode_start = step - step % STARTS_EVERY
        for age in range(depth):
            seen = step - age
            expected = counting_row(env, run, seen)["frame"] * (seen >= max(episode_start, 0))
            np.testing.assert_array_equal(stacks[t, b, depth - 1 - age], expected)


@pytest.mark.parametrize("compression", ["none", "zlib"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_a_naive_twin_under_random_operations(geometry, compression, monkeypatch):
    monkeypatch.setattr("hpcrl.replay.storage.MIN_COMPRESSED_BYTES", 16)
    layout = counting_layout(**geometry)
    rng = np.random.default_rng(5)
    shard = ReplayShard(layout, 9, num_streams=12, alpha=0.8, compression=compression)
    twin = NaiveShard(layout, 9)
    position = {env: (0, 0) for env in range(3)}  # run, next unroll
    given = []
    for step in range(150):
        env = int(rng.integers(3))
        run, k = position[env]
        if rng.random() < 0.1:
            run, k = run + 1, 0  # the environment was restarted
        elif rng.random() < 0.05:
            k += 1  # an unroll was lost on the way
        priorities = rng.random(layout.items_per_unroll)
        given.append(shard.add(counting_unroll(layout, env, run, k, priorities)))
        twin.add(env, run, k)
        position[env] = (run, k + 1)
        assert shard.check_valid() == (True, "")
        assert shard.num_stored_rows == twin.num_stored_rows()
        assert shard.num_unrolls == len(twin.unrolls)
        sampleable = twin.sampleable()
        assert shard.size == len(sampleable)
        if sampleable:
            sample = shard.sample(8, rng)
            assert_sample_is_right(layout, sample)
            assert {tuple(i) for i in sample.items["identity"].tolist()} <= sampleable
            slots, generations = given[rng.integers(len(given))]
            shard.update_priorities(slots, generations, rng.random(len(slots)))
        if step % 50 == 49 and sampleable:
            slots = np.flatnonzero(shard.sampler.is_live(np.arange(shard.sampler.capacity)))
            assert set(identity_of(shard, slots.tolist())) == sampleable
    assert shard.counters.evicted_unrolls > 0
    assert shard.counters.gaps > 0
    assert shard.counters.stale_updates > 0


def make_r2d2_shard(capacity=20, **options):
    layout = counting_layout(unroll_length=6, burn_in=4, stack=3)
    return layout, ReplayShard(layout, capacity, num_streams=4, alpha=1.0, **options)


def test_overlap_is_stored_once():
    layout, shard = make_r2d2_shard()
    for k in range(10):
        shard.add(counting_unroll(layout, 0, 0, k))
    # Ten unrolls of 6 + 1 rows with 4 rows of burn-in each, but only 61 different rows.
    assert shard.num_stored_rows == 10 * 6 + 1
    assert shard.size == 10
    assert_sample_is_right(layout, shard.sample(30, np.random.default_rng(0)))


def test_one_stored_step_costs_at_most_a_frame_and_its_scalars_plus_five_percent():
    # One Atari step of an R2D2 agent: frame, scalars; per unroll an LSTM state of 2 x 512.
    scalar, flag = ArraySpec((), "float32"), ArraySpec((), "bool")
    rows = {"frame": ArraySpec((84, 84), "uint8"), "reward": scalar, "action": scalar}
    rows |= {"start": flag, "terminated": flag, "final": flag}
    items = {"core_state": ArraySpec((1024,), "float32")}
    layout = ReplayLayout(rows, items, unroll_length=80, burn_in=40, stacks={"frame": 4})
    shard = ReplayShard(layout, 100, num_streams=8, alpha=0.9)
    unroll = {p: np.zeros((81, *s.shape), s.dtype) for p, s in rows.items()}
    state = {"core_state": np.zeros((1, 1024), np.float32)}
    template = counting_unroll(counting_layout(unroll_length=80), 0, 0, 0)
    for k in range(100):
        shard.add(template._replace(unroll_index=k, rows=unroll, items=state))
    assert layout.row_bytes == 84 * 84 + 4 + 4 + 3
    assert shard.num_stored_rows == 8001
    assert shard.nbytes / shard.num_stored_rows <= 1.05 * layout.row_bytes


def test_first_unrolls_padded_prefix_is_masked():
    layout, shard = make_r2d2_shard()
    shard.add(counting_unroll(layout, 2, 5, 0))
    sample = shard.sample(1, np.random.default_rng(0))
    assert sample.valid[:, 0].tolist() == [False] * 4 + [True] * 7
    assert not sample.rows["frame"][:4].any()
    assert not sample.prefixes["frame"].any()
    np.testing.assert_array_equal(sample.rows["depth"][4:, 0], 3000 + np.arange(7))
    np.testing.assert_array_equal(sample.items["core_state"], [[2.25, 5.25, 0.25]])


def test_frames_across_block_boundaries_are_right():
    layout, shard = make_r2d2_shard()
    for k in range(3):
        for env in range(2):  # two streams interleave in memory
            shard.add(counting_unroll(layout, env, 0, k))
    sample = shard.sample(40, np.random.default_rng(0))
    last = np.flatnonzero((sample.items["identity"] == [1, 0, 2, 0]).all(axis=1))[0]
    # Unroll 2: loss rows 12..17, bootstrap 18, burn-in 8..11, stack prefix 6..7 of which
    # row 7 starts an episode, so that row 6 is hidden.
    np.testing.assert_array_equal(sample.rows["depth"][:, last], 2000 + np.arange(8, 19))
    assert not sample.prefixes["frame"][0, last].any()
    np.testing.assert_array_equal(sample.prefixes["frame"][1, last], counting_row(1, 0, 7)["frame"])


def test_a_restarted_stream_does_not_see_rows_of_the_run_before():
    layout, shard = make_r2d2_shard()
    for k in range(3):
        shard.add(counting_unroll(layout, 0, 0, k))
    shard.add(counting_unroll(layout, 0, 1, 0))
    shard.add(counting_unroll(layout, 0, 1, 1))
    assert shard.size == 5  # the last unroll of the old run kept its bootstrap row
    assert_sample_is_right(layout, shard.sample(64, np.random.default_rng(0)))


def test_an_item_is_dropped_when_the_rows_before_it_are_evicted():
    layout, shard = make_r2d2_shard(capacity=3)
    first = [shard.add(counting_unroll(layout, 0, 0, k)) for k in range(3)]
    assert shard.size == 3
    shard.add(counting_unroll(layout, 0, 0, 3))
    # Unroll 0 is gone, unroll 1 only serves as burn-in of unroll 2.
    assert set(identity_of(shard, [2, 0])) == {(0, 0, 2, 0), (0, 0, 3, 0)}
    assert shard.update_priorities(*first[1], [5.0]) == 1
    assert shard.size == 2


def test_an_unroll_after_a_gap_only_serves_the_ones_after_it():
    layout, shard = make_r2d2_shard()
    shard.add(counting_unroll(layout, 0, 0, 0))
    shard.add(counting_unroll(layout, 0, 0, 2))
    assert (shard.size, shard.counters.gaps, shard.counters.incomplete_items) == (1, 1, 1)
    shard.add(counting_unroll(layout, 0, 0, 3))
    assert set(identity_of(shard, [0, 2])) == {(0, 0, 0, 0), (0, 0, 3, 0)}


def test_an_item_that_is_not_eligible_is_never_drawn():
    layout = counting_layout(unroll_length=4, sequence_length=2, items_per_unroll=4)
    shard = ReplayShard(layout, 5, num_streams=1, alpha=1.0)
    eligible = np.array([True, False, True, True])
    shard.add(counting_unroll(layout, 0, 0, 0, eligible=eligible))
    # Item 0 would begin before the run, item 1 is not eligible.
    assert set(identity_of(shard, [2, 3])) == {(0, 0, 0, 2), (0, 0, 0, 3)}
    assert shard.size == 2
    assert shard.counters.incomplete_items == 2


def test_more_runs_than_room_for_bootstrap_rows_cost_the_oldest_ones_last_item():
    layout = counting_layout(unroll_length=3)
    shard = ReplayShard(layout, 10, num_streams=1, alpha=1.0)  # two bootstrap rows
    for run in range(4):
        shard.add(counting_unroll(layout, 0, run, 0))
        assert shard.check_valid() == (True, "")
    assert shard.counters.reclaimed_rows == 2
    assert set(identity_of(shard, [2, 3])) == {(0, 2, 0, 0), (0, 3, 0, 0)}
    assert_sample_is_right(layout, shard.sample(16, np.random.default_rng(0)))
    # A run that goes on after it lost its bootstrap row is whole again from here on.
    for k in (1, 2):
        shard.add(counting_unroll(layout, 0, 0, k))
        assert shard.check_valid() == (True, "")
    assert_sample_is_right(layout, shard.sample(64, np.random.default_rng(0)))


def test_stale_write_back_never_lands_on_a_newer_unroll():
    layout, shard = make_r2d2_shard(capacity=2)
    old = shard.add(counting_unroll(layout, 0, 0, 0, [1.0]))
    shard.add(counting_unroll(layout, 1, 0, 0, [1.0]))
    shard.add(counting_unroll(layout, 2, 0, 0, [1.0]))  # takes the place of the first
    assert shard.update_priorities(*old, [1000.0]) == 1
    assert shard.sampler.priority([0]) == 1.0


def test_age_counts_the_unrolls_that_came_after():
    layout, shard = make_r2d2_shard()
    for env in range(4):
        shard.add(counting_unroll(layout, env, 0, 0))
    sample = shard.sample(50, np.random.default_rng(0))
    np.testing.assert_array_equal(sample.age_unrolls, 3 - sample.items["identity"][:, 0])
    np.testing.assert_array_equal(sample.priority_age_draws, np.ones(50))


def test_buffers_are_reused():
    layout, shard = make_r2d2_shard()
    for k in range(5):
        shard.add(counting_unroll(layout, 0, 0, k))
    buffers = shard.make_buffers(7)
    for seed in range(3):
        sample = shard.sample(7, np.random.default_rng(seed), out=buffers)
        assert_sample_is_right(layout, sample)
        for path, rows in sample.rows.items():
            assert np.shares_memory(rows, buffers.rows[path])
            assert rows.flags.c_contiguous
        for path, items in sample.items.items():
            assert items is buffers.items[path]


def test_draws_without_replacement_have_no_duplicates():
    layout, shard = make_r2d2_shard()
    for k in range(15):
        shard.add(counting_unroll(layout, 0, 0, k, [float(k)]))
    sample = shard.sample(15, np.random.default_rng(0), replacement=False)
    assert len(set(sample.slots.tolist())) == 15


@pytest.mark.parametrize("codec", available_codecs())
def test_compressed_rows_come_back_bit_for_bit(codec):
    noise = np.random.default_rng(0).integers(0, 256, (5, 20, 20), dtype=np.uint8)
    noise[2:] = 7  # compressible in part
    rows = {"frame": ArraySpec((20, 20), "uint8"), "scalar": ArraySpec((), "float32")}
    layout = ReplayLayout(rows, {}, unroll_length=4)
    shard = ReplayShard(layout, 3, num_streams=1, alpha=1.0, compression=codec)
    template = counting_unroll(counting_layout(unroll_length=4), 0, 0, 0)
    unroll = {"frame": noise, "scalar": np.arange(5, dtype=np.float32)}
    shard.add(template._replace(rows=unroll, items={}))
    sample = shard.sample(2, np.random.default_rng(0))
    for b in range(2):
        np.testing.assert_array_equal(sample.rows["frame"][:, b], noise)


def test_compressed_bytes_stay_below_the_limit():
    rows = {"frame": ArraySpec((16, 16), "uint8")}
    layout = ReplayLayout(rows, {}, unroll_length=4)
    template = counting_unroll(counting_layout(unroll_length=4), 0, 0, 0)
    rng = np.random.default_rng(0)
    limit = 10_000
    shard = ReplayShard(layout, 50, 1, alpha=1.0, compression="zlib", compressed_bytes_limit=limit)
    for k in range(50):  # noise: about 1 KiB per unroll, compressed or not
        frames = rng.integers(0, 256, (5, 16, 16), dtype=np.uint8)
        shard.add(template._replace(unroll_index=k, rows={"frame": frames}, items={}))
        assert shard.check_valid() == (True, "")
        assert sum(store.nbytes for store in shard._rows.values()) <= limit
    assert 5 <= shard.num_unrolls < 10
    assert shard.size == shard.num_unrolls


def test_lz4_is_used_through_its_block_functions(monkeypatch):
    stub = types.SimpleNamespace(
        compress=lambda data: b"!" + zlib.compress(data),
        decompress=lambda data: zlib.decompress(data[1:]),
    )
    monkeypatch.setitem(sys.modules, "lz4", types.ModuleType("lz4"))
    monkeypatch.setitem(sys.modules, "lz4.block", stub)
    codec = make_codec("lz4")
    assert codec is not None
    packed = codec.compress(memoryview(b"abc"))
    assert packed.startswith(b"!")
    assert codec.decompress(packed) == b"abc"


def test_a_codec_that_is_missing_or_unknown_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ValueError, match="pip install lz4"):
        make_codec("lz4")
    with pytest.raises(ValueError, match="'zstd' is not one of none, zlib, lz4"):
        make_codec("zstd")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": {}}, ValueError, "row leaves"),
        ({"items": {"identity": np.zeros((1, 4), np.int64)}}, ValueError, "item leaves"),
        ({"priorities": np.ones(2)}, ValueError, "priorities: expected shape"),
        ({"priorities": np.array([np.nan])}, ValueError, "priority nan"),
        ({"eligible": np.ones(2, bool)}, ValueError, "eligible: expected shape"),
        ({"unroll_index": -1}, ValueError, "unroll_index -1"),
    ],
)
def test_a_bad_unroll_is_refused_and_changes_nothing(change, error, message):
    layout, shard = make_r2d2_shard()
    unroll = counting_unroll(layout, 0, 0, 0)
    with pytest.raises(error, match=message):
        shard.add(unroll._replace(**change))
    short = {path: rows[:-1] for path, rows in unroll.rows.items()}
    with pytest.raises(ValueError, match=r"expected shape \[7"):
        shard.add(unroll._replace(rows=short))
    wrong = {**unroll.rows, "reward": unroll.rows["reward"].astype(np.float64)}
    with pytest.raises(TypeError, match="'reward': expected dtype float32"):
        shard.add(unroll._replace(rows=wrong))
    assert shard.num_unrolls == shard.size == 0
    assert shard.check_valid() == (True, "")


def test_a_capacity_below_the_span_of_one_item_is_refused():
    layout = counting_layout(unroll_length=6, burn_in=4, stack=3)
    with pytest.raises(ValueError, match="one item spans 2 unrolls"):
        ReplayShard(layout, 1, num_streams=1, alpha=1.0)
