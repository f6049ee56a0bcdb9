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
    lag,
    learning_curve,
    report,
    scaling,
    throughput,
)
from analysis._common import command
from analysis.errors import DataError
from analysis.reader import Run
from tests.recording_tools import IMAGES, VECTOR, write_run

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


def test_groups_of_one_name_are_told_apart_by_their_folders(tmp_path, capsys):
    runs: list = []
    for folder, rate in (("a", "0.001"), ("b", "0.5")):
        (tmp_path / folder).mkdir()
        runs.append(write_run(tmp_path / folder, "s1", seed=len(folder) + len(runs)))
        text = (runs[-1] / "config.yaml").read_text()
        (runs[-1] / "config.yaml").write_text(text + f"changed: {rate}\n")
    for module in (learning_curve, actions, throughput, lag, episodes, scaling):
        table = table_of(module, runs, capsys)
        labels = table["group" if module is learning_curve else "run"].unique().tolist()
        assert [label.split(" ")[0] for label in labels] == ["a/s1", "b/s1"]
    table = table_of(learning_curve, runs, capsys).groupby("group")["median"].max()
    assert table.tolist() == [5.0, 10.0]
    output = tmp_path / "report.html"
    assert report.main([*map(str, runs), "-o", str(output)]) == 0
    assert "a/s1, b/s1" in output.read_text()


def test_evaluations_are_drawn_where_their_weights_were_made(tmp_path, capsys):
    run = write_run(tmp_path)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Frames are 100 and wall time 1 s a record; each round is reported 3 records later.
    for place, (played, value) in {2: (0, 1.0), 4: (150, 2.0), 5: (200, 3.0)}.items():
        records[place] |= {"eval/frames": played, "eval/return": value}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    table = table_of(learning_curve, [run], capsys, "--y", "eval/return")
    np.testing.assert_allclose(table["frames"], np.linspace(0, 200, 100))
    wanted = np.interp(table["frames"], [0, 150, 200], [1.0, 2.0, 3.0])
    np.testing.assert_allclose(table["median"], wanted, atol=1e-8)
    table = table_of(learning_curve, [run], capsys, "--y", "eval/return", "--x", "wall_time_s")
    assert table["wall_time_s"].tolist() == pytest.approx(np.linspace(0, 2, 100))


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
    assert table["over"].to_dict() == {
        "policy_lag": "report intervals",
        "weight_changes": "episodes",
    }


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


@pytest.mark.parametrize("env", [VECTOR, IMAGES], ids=["vector", "images"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_episodes_leave_quarters_empty_and_are_reported(tmp_path, capsys, env, count):
    run = write_run(tmp_path, episodes=count, segments=1, env=env)
    table = table_of(actions, [run], capsys)
    # Lengths are 3, 4, 5, 6, 7, and a quarter is that of an episode's first step.
    quarters = {1: [1], 2: [1, 2], 3: [1, 2, 3], 5: [1, 2, 3]}
    assert sorted(set(table["quarter"])) == quarters[count]
    assert table.groupby("quarter")["share"].sum().to_numpy() == pytest.approx(1.0)
    output = tmp_path / "report.html"
    assert report.main([str(run), "-o", str(output)]) == 0
    assert "Actions and states" in output.read_text()


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


BLOCK = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hpcrl", "mpi4py", "torch", "env_wrappers"):
            raise AssertionError(f"analysis imports {name}")
sys.meta_path.insert(0, Refuse())
import analysis
modules = {
    module.name: importlib.import_module(f"analysis.{module.name}")
    for module in pkgutil.iter_modules(analysis.__path__)
}
from analysis._common import command
run, out = sys.argv[1:]
questions = {name for name, module in modules.items() if hasattr(module, "analyse")}
with_main = {name for name, module in modules.items() if hasattr(module, "main")}
assert questions == {"actions", "compare", "episodes", "games", "lag", "learning_curve", "scaling",
                     "throughput"}
assert with_main == {"export", "games", "index", "report", "video"}
for name in questions:
    module = modules[name]
    kind = "csv" if module is modules["games"] else "png"
    words = [run] * (2 if name == "compare" else 1) + ["-o", f"{out}/{name}.{kind}"]
    options = getattr(module, "add_options", lambda parser: None)
    assert command(name, module.__doc__, module.analyse, options, words) == 0, name
assert modules["report"].main([run, "-o", f"{out}/report.html"]) == 0
assert modules["video"].main([run, "-o", f"{out}/video.gif"]) == 0
assert modules["index"].main([run]) == 0
for kind in ("d4rl", "robomimic"):  # minari itself imports torch where it is installed
    assert modules["export"].main([run, "--format", kind, "-o", f"{out}/{kind}"]) == 0, kind
"""


def test_every_script_needs_no_hpcrl_mpi_torch_or_display(tmp_path):
    run = write_run(tmp_path, env=IMAGES)
    evaluation = run / "evaluations" / "step-1-0"
    evaluation.mkdir(parents=True)
    summary = {"env_name": "x", "mean_return": 1, "human_normalised": 1, "episodes": 1, "frames": 1}
    (evaluation / "summary.json").write_text(json.dumps(summary))
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, str(run), str(tmp_path)],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
