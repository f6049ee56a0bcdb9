import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrl.run.counters import Counters
from hpcrl.run.metrics import (
    MetricsWriter,
    discard_metrics_after,
    read_last_metrics,
    read_metrics,
)
from hpcrl.run.run_dir import RunDirError


def write(run_dir, restart, *learner_steps, tensorboard=False, start=None):
    writer = MetricsWriter(run_dir, restart, tensorboard, start, clock=lambda: 5.0)
    for step in learner_steps:
        writer.write(Counters(step, 10 * step, 40 * step, step, 0.5 * step), {"loss": step / 4})
    writer.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def learner_steps(run_dir):
    return [record["learner_steps"] for record in read_metrics(run_dir)]


def test_a_record_holds_time_restart_counters_and_values(tmp_path):
    writer = MetricsWriter(tmp_path, restart=2, tensorboard=False, clock=lambda: 17.5)
    values = {"loss": np.float32(0.5), "return": float("nan"), "norm": float("inf"), "lag": None}
    record = writer.write(Counters(1, 20, 80, 3, 2.5), values)
    on_disk = lines(tmp_path / "metrics.jsonl")
    assert on_disk == [record]
    assert record == {
        "time_unix_s": 17.5,
        "restart": 2,
        "learner_steps": 1,
        "agent_steps": 20,
        "frames": 80,
        "episodes": 3,
        "wall_time_s": 2.5,
        "stale_unrolls_dropped": 0,
        "loss": 0.5,
        "return": None,
        "norm": None,
        "lag": None,
    }
    with pytest.raises(ValueError, match="frames"):
        writer.write(Counters(), {"frames": 1.0})
    writer.close()


def test_restarts_append(tmp_path):
    write(tmp_path, 0, 1, 2)
    write(tmp_path, 1, 3)
    assert [(r["restart"], r["learner_steps"]) for r in read_metrics(tmp_path)] == [
        (0, 1),
        (0, 2),
        (1, 3),
    ]


def test_a_last_line_cut_anywhere_is_passed_over_and_does_not_touch_the_next(tmp_path):
    write(tmp_path, 0, 1, 2)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    ends = (first, len(whole))
    for length in {*range(0, len(whole), 29), *(e + d for e in ends for d in (-2, -1, 0))}:
        path.write_bytes(whole[:length])
        expected = [1, 2] if length >= len(whole) - 1 else [1] if length >= first - 1 else []
        assert learner_steps(tmp_path) == expected
        last = read_last_metrics(tmp_path)
        assert ([last["learner_steps"]] if last else []) == expected[-1:]
        discard_metrics_after(tmp_path, 2)
        write(tmp_path, 1, 9)
        assert learner_steps(tmp_path) == [*expected, 9]


def test_the_newest_record_is_found_without_reading_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_last_metrics(tmp_path) is None
    path.write_text("".join(json.dumps({"learner_steps": i}) + "\n" for i in range(50_000)))
    assert read_last_metrics(tmp_path) == {"learner_steps": 49_999}


def test_damage_in_the_middle_is_named_by_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"learner_steps": 1}\ngarbage\n{"learner_steps": 2}\n')
    with pytest.raises(RunDirError, match="line 2"):
        read_metrics(tmp_path)


def test_no_file_means_no_records(tmp_path):
    assert read_metrics(tmp_path) == []
    assert discard_metrics_after(tmp_path, 0) == 0


def test_records_beyond_the_checkpoint_are_moved_and_the_curve_goes_on(tmp_path):
    write(tmp_path, 0, 1, 2, 3, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"learner_steps": 5, "lo')
    assert discard_metrics_after(tmp_path, 2) == 3
    write(tmp_path, 1, 3, 4, 5)
    assert learner_steps(tmp_path) == [1, 2, 3, 4, 5]
    moved = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["learner_steps"] for line in moved[:2]] == [3, 4]
    assert moved[2:] == ['{"learner_steps": 5, "lo']
    assert discard_metrics_after(tmp_path, 5) == 0
    assert discard_metrics_after(tmp_path, -1) == 5
    assert learner_steps(tmp_path) == []
    assert len((tmp_path / "metrics.discarded.jsonl").read_text().splitlines()) == 8


def test_a_disk_that_fills_up_leaves_whole_lines_only(tmp_path):
    """The kernel lets the child's file grow to 1000 bytes, which cuts a line."""
    script = (
        "import sys, pathlib; from hpcrl.run.counters import Counters\n"
        "from hpcrl.run.metrics import *\n"
        "writer = MetricsWriter(pathlib.Path(sys.argv[1]), 0, False)\n"
        "try:\n"
        "    for step in range(100): writer.write(Counters(step), {})\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert child.stdout.startswith("RunDirError can't write"), child.stderr
    assert "File too large" in child.stdout
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert [record["learner_steps"] for record in lines(tmp_path / "metrics.jsonl")] == [
        *range(text.count("\n"))
    ]
    assert 1000 - len(text) < len(text.splitlines()[-1]) + 1


def scalars(run_dir, tag):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_the_same_values_over_frames(tmp_path):
    write(tmp_path, 0, 1, 2, 3, tensorboard=True)
    assert scalars(tmp_path, "loss") == [(40, 0.25), (80, 0.5), (120, 0.75)]


def test_tensorboard_shows_an_evaluation_over_the_frames_of_its_weights(tmp_path):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    for step in (1, 2, 3):
        played = {"eval/return": 5.0 * step, "eval/frames": 40.0 * step - 20} if step > 1 else {}
        writer.write(Counters(step, 10 * step, 40 * step), {"loss": 1.0, **played})
    writer.close()
    assert scalars(tmp_path, "loss") == [(40, 1.0), (80, 1.0), (120, 1.0)]
    assert scalars(tmp_path, "eval/return") == [(60, 10.0), (100, 15.0)]


def test_tensorboard_forgets_what_a_restart_does_again(tmp_path, monkeypatch):
    write(tmp_path, 0, 1, 2, 3, tensorboard=True)
    first = next((tmp_path / "tensorboard").iterdir())
    first.rename(first.with_name(first.name.replace("0000000005", "0000000004")))
    start = Counters(2, 20, 80, 2, 1.0)
    writer = MetricsWriter(tmp_path, 1, True, start, clock=lambda: 5.0)
    writer.write(Counters(4, 40, 160, 4, 2.0), {"loss": 9.0, "nan": float("nan")})
    writer.close()
    assert scalars(tmp_path, "loss") == [(40, 0.25), (80, 0.5), (160, 9.0)]


def test_a_failing_event_file_is_reported_once_and_metrics_go_on(tmp_path):
    writer = MetricsWriter(tmp_path, 0, True)
    os.close(writer._events._file.fileno())
    with pytest.raises(RunDirError, match=r"(?s)TensorBoard.*metrics\.jsonl goes on"):
        writer.write(Counters(1), {"loss": 1.0})
    writer.write(Counters(2), {"loss": 1.0})
    writer.close()
    assert learner_steps(tmp_path) == [1, 2]


def test_a_missing_directory_is_an_error_of_the_run_directory(tmp_path):
    with pytest.raises(RunDirError, match=r"absent/metrics\.jsonl .*No such file"):
        MetricsWriter(tmp_path / "absent", 0, False)
