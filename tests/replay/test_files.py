import json

import numpy as np
import pytest

from hpcrl.replay.files import ReplayFileError, ShardFile, load_shards
from hpcrl.replay.shard_writer import save_shard
from hpcrl.replay.storage import ReplayShard
from tests.replay.test_storage import assert_sample_is_right, identity_of
from tests.replay.twins import counting_layout, counting_unroll

GEOMETRY = {"unroll_length": 6, "burn_in": 4, "stack": 3}


def make_shard(capacity=10, layout=None, **options):
    layout = counting_layout(**GEOMETRY) if layout is None else layout
    return ReplayShard(layout, capacity, num_streams=8, alpha=0.9, **options)


def fill(shard, envs, num_unrolls):
    """Every environment in turn sends its unrolls; priorities tell them apart."""
    for k in range(num_unrolls):
        for env in envs:
            shard.add(counting_unroll(shard.layout, env, 0, k, [1.0 + env + 0.125 * k]))
    return shard


def identities(shard):
    slots = np.flatnonzero(shard.sampler.is_live(np.arange(shard.sampler.capacity)))
    priorities = shard.sampler.priority(slots).tolist()
    return dict(zip(identity_of(shard, slots.tolist()), priorities, strict=True))


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_a_restored_shard_makes_the_same_draws(tmp_path, compression):
    shard = fill(make_shard(compression=compression), envs=(0, 1, 2), num_unrolls=5)
    save_shard(shard, tmp_path / "shard")
    restored = make_shard(compression=compression)
    report = load_shards([tmp_path / "shard"], restored)
    assert report.errors == ()
    assert (report.restored_unrolls, report.evicted_unrolls) == (10, 0)
    assert report.items == shard.size == restored.size
    assert restored.check_valid() == (True, "")
    one = shard.sample(32, np.random.default_rng(3))
    two = restored.sample(32, np.random.default_rng(3))
    assert_sample_is_right(shard.layout, two)
    for name in ("slots", "generations", "probability", "valid", "age_unrolls"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    # It goes on where it was: the next unroll of a run joins its predecessor.
    assert shard.update_priorities(two.slots, two.generations, np.ones(32)) == 0
    restored.add(counting_unroll(restored.layout, 0, 0, 5))
    assert_sample_is_right(restored.layout, restored.sample(64, np.random.default_rng(4)))


def test_two_shards_merge_into_one(tmp_path):
    save_shard(fill(make_shard(), (0, 2), 5), tmp_path / "a")
    save_shard(fill(make_shard(), (1, 3), 5), tmp_path / "b")
    merged = make_shard(capacity=20)
    report = load_shards([tmp_path / "a", tmp_path / "b"], merged)
    assert (report.restored_unrolls, report.evicted_unrolls, report.items) == (20, 0, 20)
    assert identities(merged) == {
        (env, 0, k, 0): 1.0 + env + 0.125 * k for env in range(4) for k in range(5)
    }
    assert_sample_is_right(merged.layout, merged.sample(64, np.random.default_rng(0)))


def test_without_room_the_oldest_unrolls_of_all_files_are_given_up(tmp_path):
    save_shard(fill(make_shard(), (0, 2), 5), tmp_path / "a")
    save_shard(fill(make_shard(), (1, 3), 5), tmp_path / "b")
    merged = make_shard(capacity=12)
    report = load_shards([tmp_path / "a", tmp_path / "b"], merged)
    assert (report.restored_unrolls, report.evicted_unrolls) == (20, 8)
    # Unrolls 2, 3, 4 of each are left, 2 as burn-in of 3.
    assert set(identities(merged)) == {(env, 0, k, 0) for env in range(4) for k in (3, 4)}


def test_one_shard_splits_into_two_by_stream(tmp_path):
    save_shard(fill(make_shard(20), (0, 1, 2, 3), 5), tmp_path / "all")
    halves = []
    for part in range(2):
        half = make_shard()
        keep = {part, part + 2}.__contains__
        report = load_shards([tmp_path / "all"], half, keep)
        assert (report.restored_unrolls, report.other_unrolls, report.items) == (10, 10, 10)
        halves.append(set(identities(half)))
    assert halves[0] == {(env, 0, k, 0) for env in (0, 2) for k in range(5)}
    assert halves[1] == {(env, 0, k, 0) for env in (1, 3) for k in range(5)}


def test_runs_after_a_restart_do_not_join_the_restored_ones(tmp_path):
    save_shard(fill(make_shard(), (0,), 3), tmp_path / "a")
    shard = make_shard()
    load_shards([tmp_path / "a"], shard)
    shard.add(counting_unroll(shard.layout, 0, 99, 0))
    assert set(identities(shard)) == {(0, 0, k, 0) for k in range(3)} | {(0, 99, 0, 0)}
    assert_sample_is_right(shard.layout, shard.sample(32, np.random.default_rng(0)))


def test_a_cut_file_costs_only_its_own_newest_unrolls(tmp_path):
    num_bytes = save_shard(fill(make_shard(), (0, 2), 5), tmp_path / "a")
    save_shard(fill(make_shard(), (1, 3), 5), tmp_path / "b")
    data = (tmp_path / "a").read_bytes()
    assert len(data) == num_bytes
    (tmp_path / "a").write_bytes(data[: num_bytes // 2])
    merged = make_shard(capacity=20)
    report = load_shards([tmp_path / "a", tmp_path / "b"], merged)
    assert len(report.errors) == 1
    assert "the file is cut at unroll" in report.errors[0]
    assert 10 < report.restored_unrolls < 20
    assert {i for i in identities(merged) if i[0] in (1, 3)} == {
        (env, 0, k, 0) for env in (1, 3) for k in range(5)
    }
    assert merged.check_valid() == (True, "")


def test_every_cut_is_noticed(tmp_path):
    path = tmp_path / "shard"
    save_shard(fill(make_shard(3), (0,), 2), path)
    data = path.read_bytes()
    for length in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        report = load_shards([path], make_shard(3))
        assert len(report.errors) == 1
        assert "cut" in report.errors[0]


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "shard"
    save_shard(fill(make_shard(3), (0,), 2), path)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    with ShardFile(path) as file, pytest.raises(ReplayFileError, match="checksum"):
        list(file.unrolls())


def replace_header(path, **changes):
    data = path.read_bytes()
    start = len(b"hpcrl-replay\n") + 8
    length = int.from_bytes(data[start - 8 : start], "little")
    header = json.loads(data[start : start + length]) | changes
    new = json.dumps(header).encode()
    path.write_bytes(
        data[: start - 8] + len(new).to_bytes(8, "little") + new + data[start + length :]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema version 2, this program reads 1"),
        ({"num_unrolls": None}, "damaged header"),
        ({"layout": {}}, "damaged header"),
        ({"compression": "magic"}, "compression 'magic' is not one of"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, changes, message):
    path = tmp_path / "shard"
    save_shard(fill(make_shard(3), (0,), 2), path)
    replace_header(path, **changes)
    with pytest.raises(ReplayFileError, match=message):
        ShardFile(path)


def test_files_that_are_no_shards_cost_nothing_else(tmp_path):
    (tmp_path / "text").write_text("this is not a replay file")
    (tmp_path / "empty").write_bytes(b"")
    other = counting_layout(unroll_length=6, burn_in=2, stack=3)
    save_shard(fill(make_shard(layout=other), (0,), 2), tmp_path / "other")
    save_shard(fill(make_shard(), (0, 1), 5), tmp_path / "good")
    shard = make_shard(capacity=20)
    names = ("text", "empty", "missing", "other", "good")
    report = load_shards([tmp_path / name for name in names], shard)
    assert len(report.errors) == 4
    assert "not a replay file" in report.errors[0]
    assert "cut at the header" in report.errors[1]
    assert "No such file" in report.errors[2]
    assert "burn_in is 2, expected 4" in report.errors[3]
    assert report.items == 10


def test_a_file_describes_itself(tmp_path):
    path = tmp_path / "shard"
    save_shard(fill(make_shard(3), (0,), 2), path)
    start = len(b"hpcrl-replay\n") + 8
    data = path.read_bytes()
    header = json.loads(data[start : start + int.from_bytes(data[start - 8 : start], "little")])
    fields = {name: (dtype, shape) for name, dtype, shape in header["fields"]}
    assert fields["row:frame"] == ("<i4", [7, 2, 2])
    assert fields["priorities"] == ("<f8", [1])
    assert header["num_unrolls"] == 2


def test_saving_leaves_no_partial_file_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(b"old")
    save_shard(fill(make_shard(3), (0,), 2), path)
    assert [p.name for p in tmp_path.iterdir()] == ["shard"]
    assert load_shards([path], make_shard(3)).items == 2


def test_an_item_that_was_never_to_be_drawn_stays_so(tmp_path):
    shard = fill(make_shard(), (0,), 3)
    shard.add(counting_unroll(shard.layout, 0, 0, 3)._replace(eligible=np.array([False])))
    save_shard(shard, tmp_path / "a")
    restored = make_shard()
    assert load_shards([tmp_path / "a"], restored).restored_unrolls == 4
    assert restored.size == shard.size == 3
    assert identities(restored) == identities(shard)
