import os

import pytest
from rich.console import Console

from hpcrl.run.counters import Counters
from hpcrl.run.metrics import MetricsWriter
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.run.status import silence_s, status_table

NOW_S = 2_000_000_000.0


def make_run(path, state, record_age_s):
    run = RunDir(path)
    run.create()
    run.write_status({"state": state, "restart": 2, "backend": "horovod"})
    writer = MetricsWriter(path, 2, tensorboard=False, clock=lambda: NOW_S - record_age_s)
    values = {"frames_per_s": 4800.0, "policy_lag": 1.5, "queue_fill": 0.25}
    writer.write(Counters(10, 1000, 4000, 20, 30.0), values)
    writer.close()
    return run


def text_of(path, now_s=NOW_S):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(status_table(path, now_s))
    return capture.get()


def test_a_running_job_shows_state_counters_and_newest_rates(tmp_path):
    make_run(tmp_path, "running", record_age_s=5.0)
    shown = text_of(tmp_path)
    for text in ("running", "horovod", "4 k", "1 k", "5 s ago", "4.8 k", "1.5", "25 %"):
        assert text in shown
    assert "killed" not in shown


@pytest.mark.parametrize(
    ("state", "age_s", "warned"),
    [("running", 59.0, False), ("running", 200.0, True), ("done", 200.0, False)],
)
def test_only_a_run_under_way_that_is_silent_is_warned_of(tmp_path, state, age_s, warned):
    make_run(tmp_path, state, age_s)
    shown = text_of(tmp_path)
    assert ("wrote nothing for" in shown) == warned
    assert ("3 min 20 s: it was killed" in shown) == warned


def test_silence_counts_from_the_newest_sign_of_life(tmp_path):
    run = make_run(tmp_path, "running", record_age_s=100.0)
    assert silence_s(tmp_path, NOW_S) == 100.0
    updated_s = run.read_status()["updated_unix_s"]
    os.unlink(run.metrics)
    assert silence_s(tmp_path, updated_s + 7.0) == pytest.approx(7.0)
    assert silence_s(tmp_path / "absent", NOW_S) is None


def test_a_run_without_metrics_and_a_directory_without_a_run(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(RunDirError, match="is not a run directory"):
        status_table(tmp_path)
    run.create()
    run.write_status({"state": "starting", "restart": 0})
    assert "none yet" in text_of(tmp_path)
