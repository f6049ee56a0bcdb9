"""`hpcrl bench replay` and `recording`: programs of benchmarks/ with a result like the others'."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.bench.ranks import BenchError, benchmark_script, run_to_end
from hpcrl.bench.result import Chart, Result, Sheet

REPLAY_GOAL, RECORDING_GOAL, READING_GOAL = 0.5, 0.97, 0.9
_LIMIT_S = 1800.0


def run_script(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a program of benchmarks/ that writes its figures with `--json`.

    Raises:
      BenchError: it failed or wrote nothing.
    """
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(benchmark_script(name)), *options, "--json", str(file)]
        code = run_to_end(command, _LIMIT_S)
        if not file.exists():  # a goal that was missed gives code 1, and figures
            raise BenchError(f"{name} ended with code {code} and wrote no figures")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def bench_replay(quick: bool) -> Result:
    """Measure a replay shard against memcpy, O(N) methods and its payload."""
    return replay_result(run_script("replay.py", ["--quick"] if quick else []))


def replay_result(found: Mapping[str, Any]) -> Result:
    """Return the result; its headline is gathering against memcpy."""
    gather, priorities, memory = found["gather"], found["priorities"], found["memory"]
    rows = [
        ("memcpy time / draw and gather", gather["gather_over_memcpy_speed"], ">= 0.5"),
        ("O(N) / priority tree", priorities["linear_over_tree"], ">= 20"),
        ("running sum / priority tree", priorities["running_sum_over_tree"], ""),
        ("bytes / frame and scalars", memory["bytes_over_frame_and_scalars"], "<= 1.05"),
    ]
    sizes = [
        (name, case["bytes_per_step"], case["sequences_per_s"])
        for name, case in found["compression"].items()
    ]
    bars = [(name, speed) for name, _, speed in sizes]
    return Result(
        "replay",
        gather["gather_over_memcpy_speed"],
        f"speed of drawing and gathering sequences over memcpy's (goal >= {REPLAY_GOAL})",
        found,
        [
            Sheet("replay shard", ("", "ratio", "goal"), rows),
            Sheet("compression", ("game, codec", "bytes a step", "sequences/s"), sizes),
        ],
        [Chart("drawing sequences", "", "sequences/s", {"sequences/s": bars}, "bars")],
    )


def bench_recording(quick: bool, pairs: int) -> Result:
    """Measure what recording costs training, and reading against plain h5py.

    Args:
      quick: a small recording.
      pairs: of training runs with and without recording.
    """
    reading = ["--parts", "episode_index", "random_reads_s"]
    options = ["--pairs", str(pairs)] if pairs else reading
    return recording_result(run_script("recording.py", [*options, *["--quick"] * quick]))


def recording_result(found: Mapping[str, Any]) -> Result:
    """Return the result; its headline is training with recording, else reading."""
    reads = found["random_reads_s"]
    reading = reads["h5py"] / reads["reader"]
    rows = [("h5py's time / the reader's", reading)]
    ratio, meaning = reading, f"speed of random reads over plain h5py's (goal >= {READING_GOAL})"
    if "training" in found:
        training = found["training"]
        ratio = training["median_ratio"]
        meaning = f"training rate with recording over that without (goal >= {RECORDING_GOAL})"
        rows += [("training rate", ratio), ("processor time", training["median_cpu_ratio"])]
    index = [
        (f"{case['steps']:,} steps", case["episodes"], case["seconds"])
        for case in found["episode_index"]
    ]
    return Result(
        "recording",
        ratio,
        meaning,
        found,
        [
            Sheet("recording", ("with / without", "ratio"), rows),
            Sheet("index of episodes", ("recording", "episodes", "seconds"), index),
        ],
        [Chart("recording: with over without", "", "ratio", {"ratio": rows}, "bars", goal=1.0)],
    )
