import json

import pytest

from hpcrl.bench import everything, scripts
from hpcrl.bench.ranks import BenchError
from hpcrl.bench.result import Result


def one(name, ratio=0.5):
    return lambda: Result(name, ratio, f"what {name} means", {})


def fails():
    raise BenchError("its ranks failed")


def test_all_of_them_run_and_leave_their_files(tmp_path, capsys):
    found = everything.bench_all({"a": one("a"), "b": one("b", 2.0)}, tmp_path / "results")
    assert found.ratio == 1.0
    assert found.figures["benchmarks"]["b"]["ratio"] == 2.0
    assert json.loads((tmp_path / "results" / "b.json").read_text())["ratio"] == 2.0
    assert (tmp_path / "results" / "a.png").stat().st_size > 0
    assert "what b means" in capsys.readouterr().out


def test_one_that_fails_is_named_after_the_others_have_run(tmp_path):
    with pytest.raises(BenchError, match=r"1 of 3 benchmarks failed: b"):
        everything.bench_all({"a": one("a"), "b": fails, "c": one("c")}, tmp_path)
    assert (tmp_path / "c.json").exists()


def test_quick_runs_what_the_long_one_runs():
    assert list(everything.quick_benchmarks()) == list(everything.benchmarks())


def test_a_script_that_writes_no_figures_is_an_error():
    with pytest.raises(BenchError, match=r"replay.py ended with code 2"):
        scripts.run_script("replay.py", ["--no-such-option"])


def test_replays_headline_is_gathering_over_memcpy():
    found = scripts.replay_result(
        {
            "gather": {"gather_over_memcpy_speed": 0.7},
            "priorities": {"linear_over_tree": 30.0, "running_sum_over_tree": 5.0},
            "memory": {"bytes_over_frame_and_scalars": 1.01},
            "compression": {"breakout/lz4": {"bytes_per_step": 500.0, "sequences_per_s": 90.0}},
        }
    )
    assert found.ratio == 0.7
    assert found.sheets[1].rows == [("breakout/lz4", 500.0, 90.0)]


def test_recordings_headline_is_training_where_it_was_measured_else_reading():
    figures = {
        "random_reads_s": {"reader": 2.0, "h5py": 1.9},
        "episode_index": [{"steps": 1000, "episodes": 5, "seconds": 0.1}],
    }
    assert scripts.recording_result(figures).ratio == pytest.approx(0.95)
    training = {"median_ratio": 0.99, "median_cpu_ratio": 0.98}
    found = scripts.recording_result({**figures, "training": training})
    assert found.ratio == 0.99
    assert found.charts[0].series["ratio"][1] == ("training rate", 0.99)
