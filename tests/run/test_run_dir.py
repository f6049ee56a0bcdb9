import json
import os
import time

import pytest

from hpcrl import exit_codes
from hpcrl.run.run_dir import RunDir, RunDirError


def test_exit_codes_are_the_documented_ones():
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper()}
    assert codes == {
        "DONE": 0,
        "USAGE": 2,
        "INTERNAL": 70,
        "LAUNCH": 71,
        "ENVIRONMENTS": 72,
        "STORAGE": 74,
        "REQUEUE": 75,
    }


def test_naming_a_run_directory_touches_no_file(tmp_path):
    run = RunDir(tmp_path / "run")
    assert not run.holds_run()
    assert run.read_status() is None
    assert os.listdir(tmp_path) == []


def test_create_makes_the_folders_and_leaves_no_test_file(tmp_path):
    run = RunDir(tmp_path / "a" / "run")
    run.create()
    run.create()
    assert sorted(os.listdir(run.path)) == ["checkpoints", "logs", "tensorboard"]
    assert not run.holds_run()


@pytest.mark.parametrize("mark", ["config.yaml", "STATUS.json", "checkpoints/step-000000000001"])
def test_a_directory_holds_a_run_once_anything_of_it_was_written(tmp_path, mark):
    run = RunDir(tmp_path)
    run.create()
    (tmp_path / mark).mkdir()
    assert run.holds_run()


def test_a_path_below_a_file_is_an_error_with_path_and_consequence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"file/run \(Not a directory\): no checkpoint .*run.dir"):
        RunDir(tmp_path / "file" / "run").create()


def test_a_disk_that_takes_names_but_no_data_is_found_before_training(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirError, match="No space left on device"):
        RunDir(tmp_path).create()
    assert not (tmp_path / ".write-test").exists()


def test_status_says_what_was_written_by_whom_and_when(tmp_path):
    run = RunDir(tmp_path)
    before = time.time()
    run.write_status({"state": "running", "counters": {"frames": 12}, "loss": float("nan")})
    run.update_status(state="done", exit_code=0)
    status = json.loads((tmp_path / "STATUS.json").read_text())
    assert before <= status.pop("updated_unix_s") <= time.time()
    assert status == {
        "schema_version": 1,
        "state": "done",
        "exit_code": 0,
        "counters": {"frames": 12},
        "loss": None,
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    assert run.read_status()["counters"] == {"frames": 12}


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_status_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "STATUS.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunDirError, match=r"STATUS\.json"):
        RunDir(tmp_path).read_status()


def test_a_run_under_way_is_said_to_have_failed_by_its_first_cause(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.write_status({"state": "running", "started_unix_s": time.time() - 5.0})
    run.note_failure("the first")
    assert run.read_status()["state"] == "failed"
    run.write_status({**(run.read_status() or {}), "state": "stopping"})  # by a writer that went on
    run.note_failure("a consequence")
    run.write_status({**(run.read_status() or {}), "state": "stopping"})
    run.settle_failure("the code")
    status = run.read_status()
    assert (status["state"], status["verdict"]) == ("failed", "the first")
    assert not list(tmp_path.glob(".STATUS*"))


def test_causes_of_earlier_starts_and_ended_runs_are_left_alone(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.write_status({"state": "running", "started_unix_s": 0.0})
    run.note_failure("long ago")
    run.write_status({"state": "running", "started_unix_s": time.time() + 1.0})
    run.settle_failure("the code")
    assert run.read_status()["verdict"] == "the code"
    run.write_status({"state": "done", "verdict": "goal"})
    run.note_failure("too late")
    run.settle_failure("too late")
    assert run.read_status()["state"] == "done"
