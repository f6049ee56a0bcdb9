import os
import shutil
import threading
import time

import numpy as np
import pytest

from hpcrl.run import checkpoint_writer
from hpcrl.run.checkpoint import (
    CheckpointError,
    Snapshot,
    list_checkpoints,
    load_latest,
    partial_bytes,
)
from hpcrl.run.checkpoint_writer import CheckpointWriter


def snapshot(step, **extra_files):
    return Snapshot(step, {"w": np.full(3, step)}, {}, extra_files)


def test_submit_returns_while_the_write_goes_on_and_wait_waits_for_it(tmp_path):
    gate = threading.Event()

    def slow(path):
        assert gate.wait(60)
        path.write_text("shard")

    writer = CheckpointWriter(tmp_path, keep=3)
    assert not writer.busy
    writer.submit(snapshot(7, shard=slow))
    assert writer.busy
    assert list_checkpoints(tmp_path) == []
    assert writer.saved_step is None
    gate.set()
    writer.wait()
    assert not writer.busy
    assert writer.saved_step == 7
    assert load_latest(tmp_path).step == 7
    assert writer.write_s > 0


def test_one_write_at_a_time_in_order(tmp_path):
    running, most = [], []

    def note(path):
        running.append(path)
        most.append(len(running))
        path.write_text("")
        running.pop()

    writer = CheckpointWriter(tmp_path, keep=2)
    for step in range(1, 6):
        writer.submit(snapshot(step, shard=note))
    writer.wait()
    assert most == [1] * 5
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5, 4]


def test_a_failure_is_raised_once_at_the_next_call_and_the_writer_goes_on(tmp_path):
    def full(path):
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path, keep=3)
    writer.submit(snapshot(1))
    writer.submit(snapshot(2, shard=full))
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device.*step 1"):
        writer.submit(snapshot(3))
    assert load_latest(tmp_path).step == 1
    writer.wait()
    writer.submit(snapshot(4))
    writer.wait()
    assert writer.saved_step == 4


def test_an_error_of_the_caller_is_not_lost_in_the_thread(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    writer.submit(Snapshot(1, {}, {"not json": object()}))
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        writer.wait()


def test_who_waits_beats_while_bytes_move_and_no_longer(tmp_path, monkeypatch):
    looks, beats = [], []

    def look(run_dir):
        looks.append(partial_bytes(run_dir))
        return looks[-1]

    monkeypatch.setattr(checkpoint_writer, "_LOOK_S", 0.01)
    monkeypatch.setattr(checkpoint_writer, "partial_bytes", look)
    hang, hung, end = (threading.Event() for _ in range(3))

    def slow(path):
        with path.open("wb", buffering=0) as file:
            while not hang.wait(0.005):
                file.write(b"x")
        hung.set()
        end.wait(60)

    writer = CheckpointWriter(tmp_path, keep=3)
    writer.submit(snapshot(7, shard=slow))
    waiter = threading.Thread(target=writer.wait, args=(lambda: beats.append(1),))
    waiter.start()
    until(lambda: len(beats) > 5)
    hang.set()
    assert hung.wait(60)
    seen = len(looks) + 2  # one look may be under way, and the next one sees the last bytes
    until(lambda: len(looks) >= seen)
    before = len(beats)
    until(lambda: len(looks) >= seen + 10)
    assert len(beats) == before
    end.set()
    waiter.join(60)
    assert load_latest(tmp_path).step == 7


def until(condition):
    end_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_what_is_renamed_while_its_bytes_are_counted_is_passed_over(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints" / "tmp-step-000000000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_bytes(bytes(7))
    assert partial_bytes(tmp_path) == 7
    scandir = os.scandir

    def vanishing(path):
        if path == folder:
            monkeypatch.undo()
            shutil.rmtree(folder)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert partial_bytes(tmp_path) == 0
    assert not folder.exists()
