"""A run directory in which others are at work is left to them."""

import contextlib
import os
import threading
import time

import pytest

from hpcrl.run import verdict
from hpcrl.run.heartbeat import LEFT, Beat
from hpcrl.run.in_use import check_free, ranks_at_work
from hpcrl.run.node_table import NodeTable, Offer
from hpcrl.run.resume import open_run
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.run.verdict import judge_run

TICK_S = 0.2
WAIT_S = 2 * TICK_S + 1.0
NOBODY = 2**22 + 1  # above the largest process id of Linux


def beat_of(**changes):
    host = os.uname().nodename
    return Beat(1, "learner 0", host, os.getpid(), 4, TICK_S, "update")._replace(**changes)


class Rank:
    """Writes signs of life into a run that is under way."""

    def __init__(self, folder, state="running"):
        RunDir(folder).create()
        RunDir(folder).write_status({"state": state, "restart": 4})
        self._table = NodeTable(folder, "node-00000", Offer().facts, 1, 0, 3)

    def write(self, **changes):
        beat = beat_of(**changes)
        self._table.put(beat, ())
        self._table.write_if_due(beat)

    @contextlib.contextmanager
    def at_work(self, **changes):
        end = threading.Event()

        def go():
            beats = 0
            while not end.wait(TICK_S):
                beats += 1
                self.write(beats=beats, **changes)

        thread = threading.Thread(target=go)
        self.write(**changes)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


@pytest.mark.parametrize("host", [os.uname().nodename, "elsewhere"])
def test_who_is_at_work_is_named_and_nothing_is_touched(tmp_path, host):
    rank = Rank(tmp_path)
    pid = os.getpid() if host != "elsewhere" else NOBODY
    with rank.at_work(host=host, pid=pid):
        named = rf"is in use: learner 0 \(rank 1, {host}, pid {pid}\) of start 4"
        with pytest.raises(RunDirError, match=named):
            open_run(tmp_path, "a: 1\n", "hash", "auto")
        assert judge_run(tmp_path, 2, "8", 100, 2).action == "stop"
    assert RunDir(tmp_path).read_status()["state"] == "running"
    assert not RunDir(tmp_path).config.exists()


@pytest.mark.parametrize("code", [1, 70, 71, 137])
def test_a_launch_that_failed_beside_another_start_has_no_say_about_it(tmp_path, monkeypatch, code):
    monkeypatch.setattr(verdict, "_LINGER_S", 2 * WAIT_S)
    rank = Rank(tmp_path)
    (tmp_path / "checkpoints" / "step-000000000040").mkdir(parents=True)
    with rank.at_work():
        found = judge_run(tmp_path, code, "8", 100, 2)
    assert (found.action, found.exit_code) == ("stop", code)
    assert "another start is at work" in found.reason
    assert RunDir(tmp_path).read_status()["state"] == "running"


def test_ranks_that_outlive_their_launcher_for_a_while_are_waited_for(tmp_path):
    rank = Rank(tmp_path)
    (tmp_path / "checkpoints" / "step-000000000040").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rank.at_work(host="elsewhere"))
        threading.Timer(2 * WAIT_S, stack.close).start()
        assert judge_run(tmp_path, 137, "8", 100, 2).action == "again"
    assert RunDir(tmp_path).read_status()["state"] == "failed"


def test_who_writes_no_more_is_waited_for_no_longer_than_a_beat_takes(tmp_path, monkeypatch):
    Rank(tmp_path).write(host="elsewhere")
    begun_s = time.monotonic()
    check_free(tmp_path)
    assert time.monotonic() - begun_s > 0.5 * WAIT_S
    slept: list[float] = []
    monkeypatch.setattr("hpcrl.run.in_use.time.sleep", slept.append)
    written_s = time.time() - WAIT_S
    os.utime(tmp_path / "logs" / "beats" / "node-00000", (written_s, written_s))
    check_free(tmp_path)
    assert slept == []


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ("running", {"pid": NOBODY}),  # killed, on this host
        ("running", {"stage": LEFT}),
        ("requeue", {}),
        ("failed", {}),
        ("done", {}),
    ],
)
def test_what_is_over_is_not_waited_for(tmp_path, monkeypatch, state, changes):
    slept: list[float] = []
    monkeypatch.setattr("hpcrl.run.in_use.time.sleep", slept.append)
    Rank(tmp_path, state).write(**changes)
    assert ranks_at_work(tmp_path) == []
    assert slept == []


def test_a_launch_with_wrong_options_that_nobody_disturbs_has_failed(tmp_path):
    Rank(tmp_path, "starting").write(pid=NOBODY)
    judge_run(tmp_path, 2, "8", 100, 2)
    assert RunDir(tmp_path).read_status()["state"] == "failed"
