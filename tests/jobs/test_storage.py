"""A file system that fails while a run trains: what goes on, what pauses, and how it ends."""

import errno
import os
import time

import numpy as np
import pytest

from hpcrl.comm.loopback import World
from hpcrl.comm.rounds import RoundCollector
from hpcrl.comm.stats import StatsCollector
from hpcrl.run.bookkeeping import Bookkeeper
from hpcrl.run.checkpoint import CheckpointError, load_latest, save_checkpoint
from hpcrl.run.counters import Counters, RollingReturns
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.topology import plan_topology, uniform_node_map
from tests.small import config_of


class Disk:
    """Full from the outside while `full`; counts attempts to write a checkpoint."""

    def __init__(self, monkeypatch):
        self.full, self.attempts = False, 0
        save, pwrite = save_checkpoint, RunDir.write_json

        def checked_save(*arguments):
            self.attempts += 1
            self.check(CheckpointError)
            return save(*arguments)

        def checked_json(run_dir, path, data):
            self.check(RunDirError)
            pwrite(run_dir, path, data)

        monkeypatch.setattr("hpcrl.run.checkpoint_writer.save_checkpoint", checked_save)
        monkeypatch.setattr(RunDir, "write_json", checked_json)

    def check(self, kind):
        if self.full:
            raise kind(os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr("hpcrl.run.bookkeeping._RETRY_S", 0.05)
    return Disk(monkeypatch)


def book_of(folder, **checkpoint):
    config = config_of(checkpoint={"every_s": 0.01, **checkpoint})
    topology = plan_topology(config.topology, uniform_node_map(1, 3), None, None)
    RunDir(folder).create()
    collector = StatsCollector(World(3).link(0), [1])
    counters = Counters()
    rounds = RoundCollector(World(3).link(0), [], 1)
    return Bookkeeper(
        config, topology, folder, 0, "single", counters, RollingReturns(), collector, rounds
    )


def step(book):
    book.counters.learner_steps += 1
    book.note_step({"learning_rate": 0.1, "loss": 1.0})


def snapshot():
    return {"weights": np.zeros(3)}


def until(book, condition, act=lambda: None):
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        act()
        book.poll()
        time.sleep(0.005)


def save_when_due(book):
    if book.checkpoint_due():
        book.checkpoint(snapshot, {})


def test_training_goes_on_and_the_next_checkpoint_is_tried_soon(tmp_path, disk, capsys):
    book = book_of(tmp_path, on_error="continue")
    step(book)
    disk.full = True
    until(book, lambda: disk.attempts >= 3, lambda: save_when_due(book))
    assert not book.paused()
    assert capsys.readouterr().out.count("warning: No space left on device") == 1
    disk.full = False
    until(book, lambda: load_latest(tmp_path) is not None, lambda: save_when_due(book))


def test_training_pauses_until_a_checkpoint_of_this_step_is_written(tmp_path, disk, capsys):
    book = book_of(tmp_path, on_error="pause")
    step(book)
    disk.full = True
    until(book, book.paused, lambda: save_when_due(book))
    attempts = disk.attempts
    until(book, lambda: disk.attempts > attempts + 1, lambda: save_when_due(book))
    assert book.paused()
    assert "training pauses until it can be" in capsys.readouterr().out
    disk.full = False
    until(book, lambda: not book.paused(), lambda: save_when_due(book))
    assert load_latest(tmp_path).step == 1


def test_a_pause_has_an_end(tmp_path, disk):
    book = book_of(tmp_path, on_error="pause", pause_s=0.2)
    step(book)
    disk.full = True
    until(book, book.paused, lambda: save_when_due(book))
    time.sleep(0.3)
    with pytest.raises(CheckpointError, match=r"for 0\.2 s \(checkpoint\.pause_s\)"):
        book.paused()


def test_the_checkpoint_of_a_stop_is_tried_until_it_is_written(tmp_path, disk):
    book = book_of(tmp_path, pause_s=20.0)
    step(book)
    disk.full = True
    attempts = []

    def clear_after_three():
        attempts.append(1)
        disk.full = len(attempts) < 3
        return snapshot()

    book.last_checkpoint(clear_after_three, {})
    assert load_latest(tmp_path).step == 1
    assert len(attempts) == 3


def test_a_stop_that_can_not_be_written_says_what_remains(tmp_path, disk):
    book = book_of(tmp_path, pause_s=0.0)
    step(book)
    book.last_checkpoint(snapshot, {})
    step(book)
    disk.full = True
    with pytest.raises(CheckpointError, match="No space left"):
        book.last_checkpoint(snapshot, {})
    assert load_latest(tmp_path).step == 1


def test_status_and_metrics_that_can_not_be_written_do_not_end_a_run(tmp_path, disk, monkeypatch):
    book = book_of(tmp_path)
    step(book)
    disk.full = True

    def no_space(*arguments):
        raise RunDirError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(book._metrics, "write", no_space)
        book.report({})
        book.stopping()
    assert read_metrics(tmp_path) == []
    disk.full = False
    step(book)
    book.report({})
    (record,) = read_metrics(tmp_path)
    assert record["failed_checkpoints"] == 0


def test_the_copy_and_the_write_of_a_checkpoint_are_in_the_metrics_each_by_itself(tmp_path, disk):
    """The learner stands still for the copy; the write goes on beside it."""
    book = book_of(tmp_path, every_s=1000.0)

    def slowly():
        time.sleep(0.3)
        return snapshot()

    step(book)
    book.checkpoint(slowly, {})
    book._writer.wait()
    book.report({})
    record = read_metrics(tmp_path)[-1]
    assert record["checkpoint_copy_s"] >= 0.3
    assert 0 < record["checkpoint_write_s"] < record["checkpoint_copy_s"]


@pytest.mark.parametrize(("write_s", "warned"), [(29.9, False), (30.1, True)])
def test_a_lead_that_is_short_for_the_measured_checkpoint_is_said_once(
    tmp_path, disk, capsys, write_s, warned
):
    """Of 120 s, twice the write and a minute are needed."""
    book = book_of(tmp_path)
    book._writer.write_s = write_s
    for _ in range(2):
        step(book)
        book.report({})
    said = capsys.readouterr().out.count("run.deadline_lead_s 120 is short")
    assert said == warned
