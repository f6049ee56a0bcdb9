"""What a run came to: summary, table and learning curve, from its directory alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from hpcrl.durable import atomic_write, reason
from hpcrl.human import format_count, format_duration, format_return
from hpcrl.run.checkpoint import list_checkpoints
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir, RunDirError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

_COUNTERS = (
    "frames",
    "agent_steps",
    "learner_steps",
    "episodes",
    "wall_time_s",
    "stale_unrolls_dropped",
)


class Curve(NamedTuple):
    """A learning curve.

    Attributes:
      frames: emulator frames of each point.
      returns: mean return of the last 100 episodes at each point.
      restart_frames: frames of the last record before each restart.
      evaluations: of evaluator ranks: frames that the weights were trained on, mean return.
    """

    frames: list[int]
    returns: list[float]
    restart_frames: list[int]
    evaluations: list[tuple[float, float]]


def summarise(run_dir: Path) -> dict[str, Any]:
    """Return a run's outcome as flat data; None where it isn't known.

    Keys: run_dir, state, verdict, restarts, backend, the counters, frames_per_s (mean over all
    training), mean_return_100, episodes_100, best_mean_return_100, best_at_frames,
    checkpoint_step, env_restarts (by kind of failure), dropped_gradients; of evaluator ranks
    eval_return, eval_frames.

    Raises:
      RunDirError: it is not a run directory, or its files can't be read.
    """
    status = RunDir(run_dir).read_status()
    if status is None:
        raise RunDirError(f"{run_dir} is not a run directory: it holds no STATUS.json")
    records = read_metrics(run_dir)
    last = records[-1] if records else {}
    # STATUS.json is written last at the end of a run, metrics.jsonl more often before it.
    sources = (last, status.get("counters") or {})
    newest = max(sources, key=lambda source: source.get("learner_steps", -1))
    scored = [r for r in records if r.get("mean_return_100") is not None]
    best = max(scored, key=lambda record: record["mean_return_100"], default={})
    checkpoints = list_checkpoints(run_dir)
    frames, seconds = newest.get("frames"), newest.get("wall_time_s")
    score = status.get("mean_return_100")
    return {
        "run_dir": str(run_dir),
        "state": status.get("state"),
        "verdict": status.get("verdict"),
        "restarts": status.get("restart"),
        "backend": status.get("backend"),
        **{name: newest.get(name) for name in _COUNTERS},
        "frames_per_s": frames / seconds if frames is not None and seconds else None,
        "mean_return_100": last.get("mean_return_100") if score is None else score,
        "episodes_100": last.get("episodes_100"),
        "eval_return": status.get("eval_return"),
        "eval_frames": status.get("eval_frames"),
        "best_mean_return_100": best.get("mean_return_100"),
        "best_at_frames": best.get("frames"),
        "checkpoint_step": checkpoints[0][0] if checkpoints else None,
        "env_restarts": status.get("env_restarts"),
        "dropped_gradients": last.get("dropped_gradients"),
    }


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return what `summarise` gave as a table for the end of a run."""
    best, at = summary["best_mean_return_100"], summary["best_at_frames"]
    best_text = f"{format_return(best, None)} at {format_count(at)} frames"
    evaluated = f"{format_return(summary['eval_return'], None)} at"
    rows = {
        "run directory": summary["run_dir"],
        "state": " - ".join(str(summary[k]) for k in ("state", "verdict") if summary[k]),
        "mean return, last 100": format_return(summary["mean_return_100"], summary["episodes_100"]),
        "best mean return": best_text if best is not None else "-",
        **(
            {"evaluation": f"{evaluated} {format_count(summary['eval_frames'])} frames"}
            if summary["eval_return"] is not None
            else {}
        ),
        "frames": format_count(summary["frames"]),
        "agent steps": format_count(summary["agent_steps"]),
        "learner steps": format_count(summary["learner_steps"]),
        "episodes": format_count(summary["episodes"]),
        "training time": format_duration(summary["wall_time_s"]),
        "frames/s": format_count(summary["frames_per_s"]),
        "gradient backend": str(summary["backend"] or "-"),
        "restarts": str(summary["restarts"] or 0),
        "newest checkpoint": f"learner step {summary['checkpoint_step']}"
        if summary["checkpoint_step"] is not None
        else "none",
    }
    if stale := summary["stale_unrolls_dropped"]:
        rows["stale unrolls dropped"] = format_count(stale)
    if late := summary["dropped_gradients"]:
        rows["gradients dropped"] = f"{format_count(late)} as too old (since the last start)"
    failures = {kind: count for kind, count in (summary["env_restarts"] or {}).items() if count}
    if failures:
        kinds = ", ".join(f"{format_count(count)} {kind}" for kind, count in failures.items())
        rows["environments restarted"] = f"{kinds} (since the last start)"
    return key_value_table("summary", rows)


def key_value_table(title: str, rows: Mapping[str, str]) -> Table:
    """Return a two-column table of plain text."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in rows.items():
        table.add_row(label, Text(text))  # not a str, whose brackets would be markup
    return table


def learning_curve(records: Sequence[Record]) -> Curve:
    """Return the points of a learning curve; records without a finished episode have none."""
    scored = [r for r in records if r.get("mean_return_100") is not None]
    points = [(record["frames"], record["mean_return_100"]) for record in scored]
    restarts = [a["frames"] for a, b in pairwise(records) if a["restart"] != b["restart"]]
    evaluated = [(r["eval/frames"], r["eval/return"]) for r in records if "eval/return" in r]
    return Curve(
        [frames for frames, _ in points], [score for _, score in points], restarts, evaluated
    )


def draw_learning_curve(curve: Curve, title: str) -> Figure:
    """Return the figure, drawn without pyplot so that no display or global state is involved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curve.frames, curve.returns, marker="." if len(curve.frames) < 50 else None)
    for index, frames in enumerate(curve.restart_frames):
        label = "restart" if index == 0 else None
        axes.axvline(frames, color="grey", linestyle="--", linewidth=0.8, label=label)
    if curve.evaluations:
        axes.lines[0].set_label("training")
        axes.plot(*zip(*curve.evaluations, strict=True), "o-", markersize=3, label="evaluation")
    if curve.restart_frames or curve.evaluations:
        axes.legend()
    axes.set_xlabel("emulator frames")
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure


def write_learning_curve(run_dir: Path) -> Path | None:
    """Draw RUN/learning_curve.png; None when no episode has ended yet.

    Raises:
      RunDirError: the metrics can't be read or the picture can't be written.
    """
    curve = learning_curve(read_metrics(run_dir))
    if not curve.frames:
        return None
    picture = io.BytesIO()
    draw_learning_curve(curve, run_dir.name).savefig(picture, format="png", dpi=120)
    path = run_dir / "learning_curve.png"
    try:
        atomic_write(path, picture.getvalue())
    except OSError as error:
        raise RunDirError(f"can't write {path}: {reason(error)}") from None
    return path
