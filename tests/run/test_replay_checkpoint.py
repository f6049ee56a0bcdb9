"""Which shards belong together, at whatever moment the job is killed."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.config.sections import CheckpointConfig
from hpcrl.run.replay_checkpoint import RULES, ReplayCheckpoint, ShardSet
from tests.replay.test_files import fill, make_shard
from tests.replay.twins import counting_unroll


class Learners:
    """The learners of one start of a run, one shard each."""

    def __init__(self, run_dir, count=2, kind="shared", nodes=None):
        topology = SimpleNamespace(
            learner_ranks=tuple(range(count)), node_of=nodes or [0] * count, root_learner=0
        )
        self.files = [
            ReplayCheckpoint(
                SimpleNamespace(
                    config=SimpleNamespace(checkpoint=CheckpointConfig(replay=kind)),
                    link=SimpleNamespace(label=f"learner {i}"),
                    role_index=i,
                    rank=i,
                    root=0,
                    run_dir=run_dir,
                    topology=topology,
                )
            )
            for i in range(count)
        ]
        self.shards = [fill(make_shard(30), (i, i + count), 5) for i in range(count)]

    def vote(self, checkpoint_durable=True, between=lambda: None):
        votes = [files.vote() for files in self.files]
        reduce = {"sum": sum, "max": max}
        agreed = {name: reduce[rule](v[name] for v in votes) for name, rule in RULES.items()}
        for files in self.files:
            between()
            files.agree(agreed, checkpoint_durable)
        between()

    def write(self, learner_steps, **options):
        """A whole set, as training writes it."""
        for files, shard in zip(self.files, self.shards, strict=True):
            files.begin(shard, learner_steps)
        for files in self.files:
            files._write.wait()
        self.vote(**options)
        self.vote(**options)

    def restore(self, learner_steps):
        found = self.files[0].find(learner_steps)
        self.shards = [make_shard(60) for _ in self.files]
        for files, shard in zip(self.files, self.shards, strict=True):
            if found is not None:
                files.restore(shard, found)
        return found

    @property
    def unrolls(self):
        return [sorted((u.stream_id, u.unroll_index) for u in s.unrolls()) for s in self.shards]

    @property
    def all_unrolls(self):
        return sorted(unroll for part in self.unrolls for unroll in part)


def test_whatever_moment_it_is_killed_at_there_is_one_whole_set(tmp_path, monkeypatch):
    """A copy of the run directory is taken wherever the learners have just done something."""
    run_dir = tmp_path / "run"
    copies: list[Path] = []
    learners = Learners(run_dir)
    learners.write(10)

    def killed_here():
        copy = tmp_path / f"copy{len(copies)}"
        shutil.copytree(run_dir, copy)
        copies.append(copy)

    record = ReplayCheckpoint._record

    def recorded(self, shard_set):
        killed_here()
        record(self, shard_set)
        killed_here()

    monkeypatch.setattr(ReplayCheckpoint, "_record", recorded)
    for learner_steps in (20, 30):
        for files, shard in zip(learners.files, learners.shards, strict=True):
            shard.add(counting_unroll(shard.layout, 9, 0, learner_steps // 10 - 2, [1.0]))
            files.begin(shard, learner_steps)
            killed_here()
        for files in learners.files:
            files._write.wait()
            killed_here()
            learners.vote(between=killed_here)
        learners.vote(between=killed_here)
    steps = []
    for copy in copies:
        after = Learners(copy, count=1)
        found = after.restore(40)
        steps.append(found.learner_steps)
        assert found.shards == 2
        assert found.unrolls == sum(map(len, after.unrolls)) == 20 + 2 * (steps[-1] // 10 - 1)
    assert steps == sorted(steps)
    assert set(steps) == {10, 20, 30}
    # The rest of what was killed is gone.
    assert len(list((copies[3] / "replay").glob("step-*/"))) == 1


def test_a_set_waits_for_its_checkpoint(tmp_path):
    learners = Learners(tmp_path)
    learners.write(10)
    learners.write(20, checkpoint_durable=False)
    assert [s.learner_steps for s in learners.files[0]._sets()] == [10]
    learners.vote()
    learners.vote()
    assert [s.learner_steps for s in learners.files[0]._sets()] == [20]


def test_a_set_under_way_is_not_begun_again(tmp_path):
    learners = Learners(tmp_path)
    for learner_steps in (10, 20):
        for files, shard in zip(learners.files, learners.shards, strict=True):
            files.begin(shard, learner_steps)
    for files in learners.files:
        files._write.wait()
    learners.vote()
    assert [s.learner_steps for s in learners.files[0]._sets()] == [10]


def test_the_newest_set_up_to_the_checkpoint_is_taken_and_later_ones_are_forgotten(
    tmp_path, capsys
):
    files = Learners(tmp_path).files[0]
    for steps in (10, 20, 30):
        files._record(ShardSet(steps, "shared", 2, 0, 5))
    assert files.find(25).learner_steps == 20
    assert (
        "step-000000000030 is newer than the checkpoint and is not used" in capsys.readouterr()[0]
    )
    assert files.find(40).learner_steps == 20
    assert files.find(5) is None


@pytest.mark.parametrize("after", [1, 2, 3])
def test_other_numbers_of_learners_share_all_unrolls(tmp_path, capsys, after):
    learners = Learners(tmp_path)
    learners.write(10)
    stored = learners.all_unrolls
    restarted = Learners(tmp_path, count=after)
    restarted.restore(10)
    assert restarted.all_unrolls == stored
    said = capsys.readouterr().out
    if after == 2:
        assert restarted.unrolls == learners.unrolls  # each its own, no file is read twice
        assert said.count("10 unrolls, 10 items, from its own of 2 replay shards") == 2
    else:
        assert said.count("from 2 replay shards of learner step 10") == after


def test_node_local_shards_are_found_on_their_nodes(tmp_path, monkeypatch, capsys):
    """Each node has a temporary directory of its own; two nodes with two learners each."""
    nodes = [0, 0, 1, 1]

    def on_nodes(count, kind="node_local"):
        made = Learners(tmp_path / "run", count, kind, nodes[:count])
        for files in made.files:
            node = nodes[files._index]
            files._local_folder = files._folder = tmp_path / f"node{node}" / "hpcrl-run"
        return made

    learners = on_nodes(4)
    learners.write(10)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.replay")}
    folder = "hpcrl-run/step-000000000010"
    assert names == {f"node{nodes[i]}/{folder}/shard-{i}.replay" for i in range(4)}
    restarted = on_nodes(4)
    restarted.restore(10)
    assert restarted.unrolls == learners.unrolls
    # Fewer learners share what their own node has; what is on the other node is not seen.
    capsys.readouterr()
    fewer = on_nodes(1)
    fewer.restore(10)
    assert fewer.unrolls[0] == sorted(learners.unrolls[0] + learners.unrolls[1])
    # On other nodes there is nothing, and it says so.
    shutil.rmtree(tmp_path / "node0")
    empty = on_nodes(1)
    empty.restore(10)
    assert empty.unrolls == [[]]
    assert "none of the 4 shards (node_local) is in" in capsys.readouterr().out


def test_the_node_local_folder_belongs_to_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    folders = [Learners(tmp_path / run, 1, "node_local").files[0]._folder for run in "aba"]
    assert folders[0] == folders[2] != folders[1]
    assert folders[0].parent == Path(tmp_path / "tmp")


def test_a_missing_cut_or_foreign_shard_costs_that_shard_only(tmp_path, capsys):
    learners = Learners(tmp_path, count=3)
    learners.write(10)
    folder = tmp_path / "replay" / "step-000000000010"
    (folder / "shard-0.replay").unlink()
    cut = (folder / "shard-1.replay").read_bytes()
    (folder / "shard-1.replay").write_bytes(
        cut.replace(b'"schema_version": 1', b'"schema_version": 7')
    )
    for count in (1, 3):
        restarted = Learners(tmp_path, count=count)
        restarted.restore(10)
        assert restarted.all_unrolls == learners.unrolls[2]
        said = capsys.readouterr().out
        assert "shard-0.replay: No such file" in said
        assert "shard-1.replay: schema version 7, this program reads 1" in said


def test_a_learner_without_room_costs_its_shard_only(tmp_path, capsys):
    learners = Learners(tmp_path)
    learners.write(10)
    for files, shard in zip(learners.files, learners.shards, strict=True):
        files.begin(shard, 20)
    for files in learners.files:
        files._write.wait()
    learners.files[1]._write.error = "No space left on device"
    learners.vote()
    learners.vote()
    (found,) = learners.files[0]._sets()
    assert found == ShardSet(20, "shared", 2, 1, 10)
    assert "was not saved: No space left on device" in capsys.readouterr().out


def test_when_no_learner_has_room_the_set_before_stays(tmp_path):
    learners = Learners(tmp_path)
    learners.write(10)
    for files, shard in zip(learners.files, learners.shards, strict=True):
        files.begin(shard, 20)
        files._write.wait()
        files._write.error = "No space left on device"
    learners.vote()
    assert [s.learner_steps for s in learners.files[0]._sets()] == [10]
    learners.write(30)  # and the next one is tried again
    assert [s.learner_steps for s in learners.files[0]._sets()] == [30]


def test_too_little_space_is_said_at_the_start(tmp_path, monkeypatch, capsys):
    files, shard = Learners(tmp_path).files[0], make_shard(30)
    files.check_space(shard.layout, 30, "none")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    files.check_space(shard.layout, 30, "none")
    assert "1 kB are free; a shard that finds no room is not kept" in capsys.readouterr().out
