import re

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from hpcrl.run.checkpoint import Snapshot, save_checkpoint
from hpcrl.run.counters import Counters
from hpcrl.run.metrics import MetricsWriter
from hpcrl.run.report import (
    draw_learning_curve,
    learning_curve,
    summarise,
    summary_table,
    write_learning_curve,
)
from hpcrl.run.run_dir import RunDir, RunDirError

RETURNS = (None, 0.0, 3.0, 7.5, 6.0)


def make_run(path, returns=RETURNS, **status):
    """Restart 1 begins at the third record; record i is at learner step i."""
    run = RunDir(path)
    run.create()
    run.write_status({"state": "running", "restart": 1, "backend": "mpi", **status})
    for index, score in enumerate(returns):
        writer = MetricsWriter(path, int(index >= 2), tensorboard=False)
        values = {"mean_return_100": score, "episodes_100": min(100, 40 * index)}
        writer.write(Counters(index, 100 * index, 400 * index, 40 * index, 2.0 * index), values)
        writer.close()
    return path


def text_of(renderable):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_summary_comes_from_the_directory_alone(tmp_path):
    run = make_run(tmp_path)
    save_checkpoint(run, Snapshot(3, {"w": np.zeros(1)}, {}), keep=1)
    assert summarise(run) == {
        "run_dir": str(run),
        "state": "running",
        "verdict": None,
        "restarts": 1,
        "backend": "mpi",
        "frames": 1600,
        "agent_steps": 400,
        "learner_steps": 4,
        "episodes": 160,
        "wall_time_s": 8.0,
        "stale_unrolls_dropped": 0,
        "frames_per_s": 200.0,
        "mean_return_100": 6.0,
        "episodes_100": 100,
        "eval_return": None,
        "eval_frames": None,
        "best_mean_return_100": 7.5,
        "env_restarts": None,
        "dropped_gradients": None,
        "best_at_frames": 1200,
        "checkpoint_step": 3,
    }


def test_stale_unrolls_have_a_row_where_some_were_dropped(tmp_path):
    counters = Counters(9, stale_unrolls_dropped=1234).to_dict()
    assert "stale unrolls dropped" not in text_of(
        summary_table(summarise(make_run(tmp_path / "a")))
    )
    dropped = summarise(make_run(tmp_path / "b", counters=counters))
    assert re.search(r"stale unrolls dropped +│ 1.23 k", text_of(summary_table(dropped)))


def test_gradients_that_were_too_old_have_a_row(tmp_path):
    summary = summarise(make_run(tmp_path))
    assert "gradients dropped" not in text_of(summary_table(summary))
    text = text_of(summary_table({**summary, "dropped_gradients": 12.0}))
    assert re.search(r"gradients dropped +│ 12 as too old", text)


@pytest.mark.parametrize(("steps", "frames"), [(5, 2000), (3, 1600)])
def test_the_furthest_of_status_and_metrics_counts(tmp_path, steps, frames):
    counters = Counters(steps, 100 * steps, 400 * steps, 1, 8.0).to_dict()
    run = make_run(tmp_path, counters=counters, mean_return_100=6.5)
    summary = summarise(run)
    assert summary["frames"] == frames
    assert summary["mean_return_100"] == 6.5


def test_a_run_that_has_done_nothing_yet_has_a_summary(tmp_path):
    run = make_run(tmp_path, returns=())
    summary = summarise(run)
    assert summary["frames"] is summary["mean_return_100"] is summary["checkpoint_step"] is None
    assert "none" in text_of(summary_table(summary))
    assert write_learning_curve(run) is None


def test_no_run_directory_is_a_clear_error(tmp_path):
    with pytest.raises(RunDirError, match=r"is not a run directory: it holds no STATUS\.json"):
        summarise(tmp_path)


def test_the_table_shows_the_outcome(tmp_path):
    run = make_run(tmp_path / "my-run", verdict="reached [stop.frames]")
    shown = text_of(summary_table(summarise(run)))
    for text in ("my-run", "running - reached [stop.frames]", "7.5 at 1.2 k frames", "8 s", "mpi"):
        assert text in shown


def test_the_curve_has_zero_returns_no_gaps_and_its_restarts(tmp_path):
    records = [
        {"frames": 400 * i, "restart": int(i >= 2) + int(i >= 4), "mean_return_100": score}
        for i, score in enumerate(RETURNS)
    ]
    curve = learning_curve(records)
    assert curve == ([400, 800, 1200, 1600], [0.0, 3.0, 7.5, 6.0], [400, 1200], [])
    figure = draw_learning_curve(curve, "title")
    line, *marks = figure.axes[0].get_lines()
    assert line.get_xydata().tolist() == [[400, 0], [800, 3], [1200, 7.5], [1600, 6]]
    assert [mark.get_xdata()[0] for mark in marks] == [400, 1200]


def test_the_picture_is_a_png_with_a_line_on_it(tmp_path):
    path = write_learning_curve(make_run(tmp_path))
    assert path == tmp_path / "learning_curve.png"
    pixels = imread(path)
    assert pixels.shape[0] > 300
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    assert blue.sum() > 500


def test_rounds_of_evaluators_are_drawn_at_the_frames_of_their_weights_and_shown(tmp_path):
    records = [
        {"frames": 400, "restart": 0, "mean_return_100": 1.0},
        {"frames": 800, "restart": 0, "mean_return_100": 2.0, "eval/frames": 500, "eval/return": 9},
    ]
    curve = learning_curve(records)
    assert curve.evaluations == [(500, 9)]
    axes = draw_learning_curve(curve, "title").axes[0]
    assert [line.get_label() for line in axes.lines] == ["training", "evaluation"]
    assert axes.lines[1].get_xydata().tolist() == [[500.0, 9.0]]
    run = make_run(tmp_path, eval_return=9.5, eval_frames=1_000_000)
    assert "9.5 at 1 M frames" in text_of(summary_table(summarise(run)))
