"""What a batch script does after a launch."""

import json
import subprocess
import sys

import pytest

from hpcrl.run.verdict import ATTEMPTS, Attempt, judge, judge_lost, judge_run

DONE = {"state": "done", "verdict": "stop.frames 9 reached"}
REQUEUE = {"state": "requeue", "verdict": "signal SIGUSR2"}


def attempts(*ends):
    return [Attempt("7", code, step) for code, step in ends]


@pytest.mark.parametrize(
    ("status", "ends", "action"),
    [
        (DONE, [(0, 40)], "done"),
        (REQUEUE, [(75, 40)], "requeue"),
        # A crash hidden behind the 75 of the other ranks: STATUS.json doesn't say requeue.
        ({"state": "running"}, [(75, 40)], "again"),
        ({"state": "running"}, [(0, 40)], "again"),
        ({"state": "running"}, [(137, 40)], "again"),
        ({}, [(1, -1)], "requeue"),
        ({}, [(1, -1), (1, -1)], "stop"),
        ({"state": "running"}, [(70, 40), (70, 40)], "requeue"),
        ({"state": "running"}, [(70, 40), (70, 40), (70, 40)], "stop"),
        ({"state": "running"}, [(70, 40), (70, 40), (70, 41)], "again"),
        (REQUEUE, [(75, 40), (75, 40), (75, 40)], "stop"),
        ({}, [(2, -1)], "stop"),
        ({"state": "running"}, [(71, 40)], "stop"),
        ({"state": "failed"}, [(74, 40)], "stop"),
    ],
)
def test_status_and_progress_decide(status, ends, action):
    assert judge(status, attempts(*ends)).action == action


def test_the_restarts_of_a_job_are_limited():
    ends = [(75, step) for step in range(4)]
    assert judge(REQUEUE, attempts(*ends[:3]), max_restarts=3).action == "requeue"
    verdict = judge(REQUEUE, attempts(*ends), max_restarts=3)
    assert (verdict.action, verdict.reason) == ("stop", "3 restarts used up")


def test_a_job_that_is_stopped_never_ends_with_the_code_that_asks_for_a_requeue():
    assert judge(REQUEUE, attempts((75, -1), (75, -1))).exit_code == 70
    assert judge({}, attempts((0, -1), (0, -1))).exit_code == 70
    assert judge({}, attempts((139, -1), (139, -1))).exit_code == 139


def test_a_new_job_starts_with_new_counts_but_not_with_old_progress(tmp_path):
    (tmp_path / "checkpoints" / "step-000000000040").mkdir(parents=True)
    (tmp_path / "STATUS.json").write_text(json.dumps({"state": "running"}))
    actions = [judge_run(tmp_path, 70, job, 100, 2).action for job in "1112222"]
    # Job 1 made the checkpoint, job 2 made none.
    assert actions == ["again", "requeue", "stop", "requeue", "stop", "stop", "stop"]


def test_every_launch_leaves_a_record_and_a_cut_line_is_passed_over(tmp_path):
    judge_run(tmp_path, 1, "7", 100, 2)
    with (tmp_path / ATTEMPTS).open("a") as file:
        file.write('{"job": "7", "exi')
    assert judge_run(tmp_path, 139, "7", 100, 2).action == "stop"
    records = [json.loads(x) for x in (tmp_path / ATTEMPTS).read_text().splitlines()[::2]]
    assert [(r["exit_code"], r["action"]) for r in records] == [(1, "requeue"), (139, "stop")]


def seen(folder, step, state="running"):
    (folder / "checkpoints" / f"step-{step:012d}").mkdir(parents=True)
    (folder / "STATUS.json").write_text(json.dumps({"state": state}))


def test_a_start_that_left_no_record_as_its_node_died_counts(tmp_path):
    seen(tmp_path, 40)
    # Requeued twice by Slurm; the second start got nowhere, nor did the third.
    actions = [judge_lost(tmp_path, "7", 100, 2, requeues).action for requeues in (1, 2, 3)]
    assert actions == ["again", "requeue", "stop"]
    records = [json.loads(line) for line in (tmp_path / ATTEMPTS).read_text().splitlines()]
    assert [(r["requeues"], r["exit_code"]) for r in records] == [(0, 137), (1, 137), (2, 137)]


def test_a_start_that_was_judged_at_its_end_is_not_lost(tmp_path):
    seen(tmp_path, 40, "requeue")
    assert judge_run(tmp_path, 75, "7", 100, 2, 0).action == "requeue"
    assert judge_lost(tmp_path, "7", 100, 2, 1).action == "again"
    assert len((tmp_path / ATTEMPTS).read_text().splitlines()) == 1
    # Of another job, whose first start was lost, it is no record.
    assert judge_lost(tmp_path, "8", 100, 2, 1).action == "requeue"


def test_lost_starts_use_up_restarts(tmp_path):
    for requeues in range(1, 4):
        seen(tmp_path, requeues)
        last = judge_lost(tmp_path, "7", 2, 2, requeues)
    assert (last.action, last.reason) == ("stop", "2 restarts used up")


def test_the_answer_comes_also_where_nothing_can_be_said(tmp_path):
    """The job's output may be on a file system that is full."""
    seen(tmp_path, 40, "requeue")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hpcrl", "verdict", tmp_path, "--exit-code", "75"],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
        )
    assert (done.stdout, done.returncode) == ("requeue 75\n", 0)
