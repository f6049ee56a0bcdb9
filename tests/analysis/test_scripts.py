"""What the scripts say of runs whose numbers are known."""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from analysis import (
    actions,
    compare,
    episodes,
    index,
    lag,
    learning_curve,
    report,
    scaling,
    throughput,
)
from analysis._common import command
from analysis.errors import DataError
from analysis.reader import Run
from tests.recording_tools import IMAGES, write_run

ROOT = Path(__file__).resolve().parent.parent.parent


def table_of(module, runs, capsys, *arguments):
    options = getattr(module, "add_options", lambda parser: None)
    words = [*map(str, runs), "--format", "json", *map(str, arguments)]
    assert command("x", None, module.analyse, options, words) == 0
    return pd.DataFrame(json.loads(capsys.readouterr().out))


def test_frames_and_lazy_columns_agree_across_segments(tmp_path):
    run = Run(write_run(tmp_path, segments=3))
    table = run.episodes()
    assert table["episode"].tolist() == list(range(40))
    assert table["length"].tolist() == [3 + k % 5 for k in range(40)]
    assert table["start"].tolist() == [0, *np.cumsum(table["length"])[:-1]]
    observation = run.steps("observation/obs")
    assert observation.shape == (200, 3)  # 8 times (3 + 4 + 5 + 6 + 7)
    expected = np.array([k + t for k in range(40) for t in range(3 + k % 5)], np.float32)
    for part in (slice(None), slice(60, 75), slice(5, 190, 7), slice(-3, None), slice(9, 2)):
        np.testing.assert_array_equal(observation[part][:, 0], expected[part])
    assert observation[66][1] == expected[66]
    np.testing.assert_array_equal(np.concatenate(list(observation.chunks(64)))[:, 2], expected)
    assert "final/obs" in run.episode(31)
    assert "final/obs" not in run.episode(30)
    with pytest.raises(DataError, match="the last is 39"):
        run.episode(40)
    with pytest.raises(DataError, match="was not recorded"):
        run.steps("behaviour/nothing")


def test_the_learning_curve_is_the_median_over_seeds(tmp_path, capsys):
    runs = [write_run(tmp_path, f"s{seed}", seed=seed) for seed in (1, 2, 6)]
    table = table_of(learning_curve, runs, capsys)
    assert table["group"].unique().tolist() == ["s1 (3 seeds)"]
    # Record i has seed * i at 100 (i + 1) frames, so at x the return is seed * (x / 100 - 1).
    rise = table["frames"] / 100 - 1
    np.testing.assert_allclose(table["median"], 2 * rise)
    np.testing.assert_allclose(table["q25"], 1.5 * rise)
    np.testing.assert_allclose(table["q75"], 4 * rise)
    by_hours = table_of(learning_curve, runs[:1], capsys, "--x", "node_hours")
    assert by_hours["node_hours"].iloc[-1] == pytest.approx(6 / 3600)


def test_shares_are_weighted_by_the_time_they_stand_for(tmp_path, capsys):
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:  # a last record of a hundredth second
        record = {"wall_time_s": 6.01, "frames_per_s": 700.0, "actor_step_share": 90.0}
        file.write(json.dumps(record) + "\n")
    table = table_of(throughput, [run], capsys).set_index(["role", "figure"])["mean"]
    assert table["all", "frames_per_s"] == pytest.approx((6 * 100 + 0.01 * 700) / 6.01)
    assert table["actor", "step_share"] == pytest.approx((6 * 0.75 + 0.01 * 90) / 6.01)


def test_lag_quantiles_and_weight_changes(tmp_path, capsys):
    table = table_of(lag, [write_run(tmp_path)], capsys).set_index("figure")
    assert table.loc["policy_lag", "mean"] == pytest.approx(0.5 * (0 + 1 + 2 + 3 + 4 + 5) / 6)
    assert table.loc["policy_lag", "p50"] == 1.0
    assert table.loc["weight_changes", "p99"] == 0.0


def test_episodes_are_sorted_and_cut(tmp_path, capsys):
    table = table_of(episodes, [write_run(tmp_path)], capsys, "--sort", "return", "--limit", 8)
    assert table["return"].tolist() == [7.0] * 8
    assert (table["row"] % 5 == 4).all()


def test_action_shares_by_quarter(tmp_path, capsys):
    run = write_run(tmp_path)
    table = table_of(actions, [run], capsys)
    taken = [t % 3 for k in range(40) for t in range(3 + k % 5)][:50]
    first = table[table["quarter"] == 1].set_index("action")["share"]
    assert first.to_dict() == pytest.approx({a: taken.count(a) / 50 for a in range(3)})


def test_parts_of_a_recording_follow_each_other_in_time_over_all_writers(tmp_path):
    """Two writers whose episodes alternate in time, and one that only evaluates."""
    path = write_run(tmp_path, segments=2)
    folder = path / "trajectories"
    (folder / "inference-1-0").mkdir()
    (folder / "inference-0-0" / "seg-00001.h5").rename(folder / "inference-1-0" / "seg-00000.h5")
    shutil.copytree(folder / "inference-0-0", folder / "evaluator-0-0")
    changes = {"inference-0-0": 0, "inference-1-0": -19.5, "evaluator-0-0": 0}
    for writer, change in changes.items():
        with h5py.File(folder / writer / "seg-00000.h5", "r+") as file:
            file.attrs["end"] = "finished"
            file["episodes/end_unix_s"][:] += change
            file["episodes/evaluation"][:] = writer == "evaluator-0-0"
    run = Run(path)
    table = run.episodes()
    assert len(table) == 60
    assert (table["writer"] == "evaluator-0-0").sum() == 20
    seen = []
    for spans in actions.parts_of(run, 4):
        rows = [range(first, last) for first, last in spans.tolist()]
        assert [a for a, _ in spans.tolist()] == sorted(a for a, _ in spans.tolist())
        own = table[table["start"].isin([r.start for r in rows])]
        assert not own["evaluation"].any()
        assert set(own["writer"]) == {"inference-0-0", "inference-1-0"}
        assert abs(own["length"].sum() - 50) <= 7
        seen.append(own["end_unix_s"])
    assert all(a.max() < b.min() for a, b in itertools.pairwise(seen))
    assert sum(map(len, seen)) == 40
    joined = actions.joined(np.array([[0, 3], [3, 7], [9, 10]]))
    assert joined == [(0, 7), (9, 10)]


def test_scaling_is_told_per_rank(tmp_path, capsys):
    runs = [write_run(tmp_path, f"n{n}", actors=n) for n in (2, 6)]
    table = table_of(scaling, runs[::-1], capsys)
    assert table["ranks"].tolist() == [4, 8]
    assert table["efficiency"].tolist() == [1.0, 0.5]  # the same 100 frames/s


def test_a_role_that_only_some_runs_have_counts_none_in_the_others(tmp_path, capsys):
    runs = [write_run(tmp_path, name) for name in "ab"]
    text = (runs[1] / "topology.json").read_text()
    evaluator = ', {"rank": 3, "host": "a", "role": "evaluator"}]}'
    (runs[1] / "topology.json").write_text(text.replace("]}", evaluator))
    table = table_of(scaling, runs, capsys)
    assert table["evaluators"].tolist() == [0, 1]


def test_ages_and_priorities_of_a_replay_are_shown(tmp_path, capsys):
    run = write_run(tmp_path)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for index_, record in enumerate(records):
        record |= {"replay_age_unrolls": 10.0 * index_, "priority_mean": 0.5}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    table = table_of(lag, [run], capsys).set_index("figure")
    assert table.loc["replay_age_unrolls", "mean"] == 25.0
    assert table.loc["priority_mean", "p99"] == 0.5


def test_an_interval_over_seeds_needs_two_of_them(tmp_path, capsys):
    runs = [write_run(tmp_path, f"s{seed}", seed=seed) for seed in (1, 2)]
    notes = []
    for chosen in (runs[:1], runs):
        words = [*map(str, chosen), "--format", "csv"]
        assert command("x", None, learning_curve.analyse, learning_curve.add_options, words) == 0
        notes.append(capsys.readouterr().err)
    assert "95 % interval" not in notes[0]
    assert "95 % interval over seeds 5 to 10" in notes[1]


def test_runs_are_compared_by_run_when_one_side_has_several(tmp_path, capsys):
    runs = [write_run(tmp_path, f"s{seed}", seed=seed) for seed in (1, 2, 9)]
    table = table_of(compare, runs[:2], capsys, "--versus", runs[2]).set_index(["side", "figure"])
    # Their last mean returns are 5, 10 and 45.
    assert table.loc[("first", "mean return"), "value"] == 7.5
    assert table.loc[("second - first", "mean return"), "value"] == 37.5
    assert table.loc[("second > first", "probability"), "value"] == 1.0


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_a_table_is_the_same_in_every_format(tmp_path, kind):
    run, out = write_run(tmp_path), tmp_path / f"table.{kind}"
    assert command("x", None, throughput.analyse, arguments=[str(run), "-o", str(out)]) == 0
    table = getattr(pd, f"read_{kind}")(out)
    assert table.columns.tolist() == ["run", "role", "figure", "mean"]
    expected = throughput.analyse([Run(run)], argparse.Namespace()).table
    np.testing.assert_allclose(table["mean"], expected["mean"])


def test_comparison_of_known_samples(tmp_path, capsys):
    runs = [write_run(tmp_path, f"r{reward}", reward=reward) for reward in (1.0, 2.0)]
    table = table_of(compare, runs, capsys).set_index(["side", "figure"])
    assert table.loc[("second - first", "mean return"), "value"] == 5.0  # lengths 3 to 7
    low, high = table.loc[("second - first", "mean return"), ["low", "high"]]
    assert 0 < low < 5 < high
    # Of 25 pairs (l, 2 m), l and m in 3..7, only 6 < 7 is lost and 6 = 6 tied.
    assert table.loc[("second > first", "probability"), "value"] == (23 + 0.5) / 25


@pytest.mark.parametrize("env", [None, IMAGES], ids=["vector", "images"])
def test_every_picture_is_drawn_and_the_report_stands_alone(tmp_path, env):
    run = write_run(tmp_path, **({"env": env} if env else {}))
    for module in (learning_curve, throughput, lag, episodes, actions, scaling):
        options = getattr(module, "add_options", lambda parser: None)
        output = tmp_path / f"{module.__name__}.png"
        assert command("x", None, module.analyse, options, [str(run), "-o", str(output)]) == 0
        picture = np.asarray(Image.open(output).convert("L"))
        assert (picture < 128).mean() > 0.001  # something is drawn
    assert report.main([str(run), "-o", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    of_one_run = [section for section in report.SECTIONS if section.num_runs < 2]
    videos = text.count("<video") or text.count("image/gif")
    assert videos == (env is not None)
    assert text.count("image/png") == len(of_one_run)
    assert "http" not in text


def test_the_report_of_two_runs_compares_them(tmp_path):
    runs = [str(write_run(tmp_path, f"r{reward}", reward=reward)) for reward in (1.0, 2.0)]
    assert report.main([*runs, "-o", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert text.count("image/png") == len(report.SECTIONS)
    assert "second - first" in text


def test_the_index_shows_all_segments_and_notices_a_missing_one(tmp_path, capsys):
    path = write_run(tmp_path, segments=3)
    assert index.main([str(path)]) == 0
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    made = moved / "trajectories" / "index.h5"
    run = Run(moved)
    with h5py.File(made, "r", locking=False) as file:
        np.testing.assert_array_equal(file["steps/reward"][:], run.steps("reward")[:])
        np.testing.assert_array_equal(
            file["steps/observation/obs"][60:80], run.steps("observation/obs")[60:80]
        )
        np.testing.assert_array_equal(file["episodes/start"][:], run.episodes()["start"])
    assert index.main([str(moved), "--check"]) == 0
    assert "all of its 3 segments are there" in capsys.readouterr().out
    run.close()
    (moved / "trajectories/inference-0-0/seg-00001.h5").unlink()
    before = made.read_bytes()
    assert index.main([str(moved), "--check"]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert "seg-00001.h5 is missing" in problem
    assert made.read_bytes() == before


BLOCK = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hpcrl", "mpi4py", "torch", "env_wrappers"):
            raise AssertionError(f"analysis imports {name}")
sys.meta_path.insert(0, Refuse())
import analysis
for module in pkgutil.iter_modules(analysis.__path__):
    importlib.import_module(f"analysis.{module.name}")
from analysis import report
sys.exit(report.main([sys.argv[1], "-o", sys.argv[2]]))
"""


def test_analysis_needs_no_hpcrl_mpi_torch_or_display(tmp_path):
    run = write_run(tmp_path, env=IMAGES)
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, str(run), str(tmp_path / "report.html")],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
