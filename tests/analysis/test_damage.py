"""Damaged input: a clear message, exit code 2, and nothing written over."""

import shutil
from collections.abc import Callable

import h5py
import numpy as np
import pytest

from analysis import (
    actions,
    compare,
    episodes,
    export,
    index,
    lag,
    learning_curve,
    report,
    scaling,
    throughput,
    video,
)
from analysis._common import command
from analysis.reader import Run
from tests.recording_tools import IMAGES, write_run

SEGMENT = "trajectories/inference-0-0/seg-00000.h5"


def truncated(run):
    path = run / SEGMENT
    path.write_bytes(path.read_bytes()[:-4096])


def without_first_segment(run):
    (run / SEGMENT).unlink()


def other_schema(run):
    with h5py.File(run / SEGMENT, "r+") as file:
        file.attrs["schema_version"] = 9


def mixed_environments(run):
    with h5py.File(run / SEGMENT, "r+") as file:
        file.attrs["env_name"] = "gym:CartPole-v1"


def not_closed(run):
    (run / SEGMENT).rename(run / (SEGMENT + ".part"))


def nan_rewards(run):
    with h5py.File(run / SEGMENT, "r+") as file:
        file["episodes/return"][3] = np.nan


def no_segments(run):
    shutil.rmtree(run / "trajectories")


def no_episodes(run):
    for path in (run / SEGMENT).parent.iterdir():
        path.unlink()
    (run / SEGMENT).write_bytes(b"")


DAMAGES = [
    (truncated, "damaged"),
    (without_first_segment, "seg-00000.h5 is missing"),
    (other_schema, "schema version 9, this analysis reads version 1"),
    (mixed_environments, "segments of different environments lie in one run"),
    (not_closed, "still being written"),
    (nan_rewards, "NaN"),
    (no_segments, "0 segments found"),
    (no_episodes, "damaged"),
]


def run_script(module, name, arguments):
    options = getattr(module, "add_options", lambda parser: None)
    return command(name, module.__doc__, module.analyse, options, [str(a) for a in arguments])


def scripts(out) -> dict[str, Callable]:
    """Every script that reads recordings, by name: what it is asked of a run."""
    made: dict[str, Callable] = {
        name: lambda run, name=name, module=module: run_script(
            module, name, [run, "-o", f"{out}.{kind_of(name)}"]
        )
        for name, module in (("episodes", episodes), ("actions", actions), ("lag", lag))
    }
    made["compare"] = lambda run: run_script(compare, "compare", [run, run, "-o", f"{out}.csv"])
    made["report"] = lambda run: report.main([str(run), "-o", f"{out}.html"])
    made["video"] = lambda run: video.main([str(run), "-o", f"{out}.gif"])
    made["index"] = lambda run: index.main([str(run)])
    for kind in export.EXPORTERS:
        made[f"export {kind}"] = lambda run, kind=kind: export.main(
            [str(run), "--format", kind, "-o", str(out)]
        )
    return made


def kind_of(name):
    return {"episodes": "png", "actions": "csv"}.get(name, "json")


SCRIPTS = list(scripts(""))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("damage", "message"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_script_that_reads_recordings_says_what_is_wrong(
    tmp_path, capsys, damage, message, script
):
    run, out = write_run(tmp_path, env=IMAGES), tmp_path / "out"
    damage(run)
    before = contents(tmp_path)
    reads_without = damage is no_segments and script in ("lag", "compare", "report")
    assert scripts(out)[script](run) == (0 if reads_without else 2)
    if reads_without:  # metrics alone answer something, too
        return
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [truncated, without_first_segment, other_schema])
def test_partial_uses_the_other_segment_and_says_so(tmp_path, damage):
    run = write_run(tmp_path)
    damage(run)
    partial = Run(run, partial=True)
    assert partial.episodes()["episode"].tolist() == list(range(20, 40))
    assert any("seg-00000.h5" in note for note in partial.notes)
    assert any("20 episodes are not in the recording" in note for note in partial.notes)


def test_partial_reads_what_an_open_segment_has_flushed(tmp_path):
    run = write_run(tmp_path)
    not_closed(run)
    partial = Run(run, partial=True)
    assert len(partial.episodes()) == 40
    assert any("still being written" in note for note in partial.notes)


METRICS_SCRIPTS = {
    "learning_curve": learning_curve,
    "throughput": throughput,
    "lag": lag,
    "scaling": scaling,
}


@pytest.mark.parametrize("script", [*SCRIPTS, *METRICS_SCRIPTS])
def test_an_empty_directory_and_a_missing_one_are_no_runs(tmp_path, capsys, script):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        run, out = tmp_path / name, tmp_path / "out"
        if script in SCRIPTS:
            assert scripts(out)[script](run) == 2
        else:
            assert run_script(METRICS_SCRIPTS[script], script, [run, "-o", f"{out}.csv"]) == 2
    errors = capsys.readouterr().err
    assert "is not a run directory, or an empty one" in errors
    assert "is no directory" in errors
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]


@pytest.mark.parametrize(
    "module",
    [learning_curve, compare, episodes, actions, scaling, report],
    ids=lambda m: m.__name__,
)
def test_runs_of_different_environments_are_not_put_together(tmp_path, capsys, module):
    runs = [write_run(tmp_path, name) for name in "ab"]
    text = (runs[1] / "config.yaml").read_text().replace("synthetic:counting", "gym:CartPole-v1")
    (runs[1] / "config.yaml").write_text(text)
    out = tmp_path / "out.csv"
    if module is report:
        assert report.main([*map(str, runs), "-o", str(out)]) == 2
    else:
        assert run_script(module, "x", [*runs, "-o", out]) == 2
    assert "different environments" in capsys.readouterr().err
    assert not out.exists()


def test_metrics_cut_short_by_a_kill_are_read_and_other_damage_is_named(tmp_path, capsys):
    run = write_run(tmp_path)
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"frames": 7')
    assert len(Run(run).metrics()) == 6
    path.write_bytes(b"damaged\n" + whole)
    assert run_script(throughput, "throughput", [run]) == 2
    assert "line 1 is no JSON object" in capsys.readouterr().err


def test_nothing_is_written_over(tmp_path, capsys):
    run = write_run(tmp_path, env=IMAGES)
    old = tmp_path / "old.png"
    old.write_bytes(b"precious")
    assert run_script(episodes, "episodes", [run, "-o", old]) == 2
    assert report.main([str(run), "-o", str(old)]) == 2
    assert export.main([str(run), "--format", "d4rl", "-o", str(old)]) == 2
    assert old.read_bytes() == b"precious"
    assert capsys.readouterr().err.count("nothing is written over") == 3
