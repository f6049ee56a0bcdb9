"""What a batch script does after a launch."""

import json

import pytest

from hpcrl.run.verdict import ATTEMPTS, Attempt, judge, judge_run

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
        file.write('{"job": "7", "exi\n')
    assert judge_run(tmp_path, 139, "7", 100, 2).action == "stop"
    records = [json.loads(x) for x in (tmp_path / ATTEMPTS).read_text().splitlines()[::2]]
    assert [(r["exit_code"], r["action"]) for r in records] == [(1, "requeue"), (139, "stop")]
