"""`hpcrl bench system`: the training rate against the ideal rate of this machine, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from hpcrl import exit_codes
from hpcrl.bench.costs import Costs, measure
from hpcrl.config.load import ConfigError
from hpcrl.config.root import Config
from hpcrl.metrics import read_metrics
from hpcrl.run_dir import RunDir
from hpcrl.training import read_training_config

_WARM_UP_S = 15.0
_COST_S = 3.0


def bench_system_command(
    path: str, overrides: Sequence[str], seconds: float, json_path: str | None
) -> int:
    """Measure costs, train, measure costs again, and report; return the exit code."""
    try:
        config = read_training_config(path, overrides)
    except ConfigError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return exit_codes.USAGE
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        first = measure(config, _guess_rows(config), 1, _COST_S)
        run = Path(folder) / "run"
        code, cpu = _train(path, overrides, run, seconds)
        if code != 0:
            print(f"hpcrl: the training run ended with code {code}", file=sys.stderr)
            return code
        steady = [r for r in read_metrics(run) if r["wall_time_s"] >= _WARM_UP_S]
        topology = json.loads(RunDir(run).topology.read_text())
    if len(steady) < 2:
        print(f"hpcrl: {seconds} s hold no two records of metrics", file=sys.stderr)
        return exit_codes.USAGE
    rows = max(1, round(_mean(steady, "batch_rows")))
    second = measure(config, rows, 1, _COST_S)
    figures = summarise(config, first, second, steady, topology, cpu)
    _print(figures)
    if json_path:
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return exit_codes.DONE


def _guess_rows(config: Config) -> int:
    return config.env.envs_per_actor // config.env.groups


def _train(
    path: str, overrides: Sequence[str], run: Path, seconds: float
) -> tuple[int, list[tuple[float, float]]]:
    """Train; return the exit code and (Unix seconds, CPU seconds of all ranks) samples."""
    stop = ["--stop.wall_time_s", str(_WARM_UP_S + seconds), "--metrics.every_s", "1"]
    stop += ["--stop.mean_return", "null", "--checkpoint.every_s", "0"]
    command = [sys.executable, "-m", "hpcrl", "train", path, *overrides, "--run.dir", str(run)]
    samples = []
    with subprocess.Popen([*command, *stop]) as process:
        while process.poll() is None:
            samples.append((time.time(), _cpu_s(process.pid)))
            time.sleep(1.0)
    return process.returncode, samples


def _cpu_s(pid: int) -> float:
    """CPU seconds that the live descendants of `pid` have used."""
    total = 0.0
    try:
        for child in psutil.Process(pid).children(recursive=True):
            times = child.cpu_times()
            total += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return total


def _cpu_ms_per_step(
    cpu: Sequence[tuple[float, float]], steady: Sequence[dict[str, Any]]
) -> float | None:
    first, last = steady[0], steady[-1]
    inside = [s for s in cpu if first["time_unix_s"] <= s[0] <= last["time_unix_s"]]
    if len(inside) < 2:
        return None
    rate = (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
    elapsed_s = last["wall_time_s"] - first["wall_time_s"]
    return 1e3 * rate * elapsed_s / max(last["agent_steps"] - first["agent_steps"], 1)


def _mean(records: Sequence[dict[str, Any]], name: str) -> float:
    values = [r[name] for r in records if r.get(name) is not None]
    return sum(values) / len(values) if values else 0.0


def summarise(
    config: Config,
    first: Costs,
    second: Costs,
    steady: Sequence[dict[str, Any]],
    topology: dict[str, Any],
    cpu: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """Return the figures of the JSON file.

    The costs before and after the run are averaged, as the machine's speed may drift.
    """
    cores = len(os.sched_getaffinity(0))
    costs = Costs(
        (first.environment_ms + second.environment_ms) / 2,
        second.inference_ms,
        (first.training_ms + second.training_ms) / 2,
        second.inference_rows,
    )
    elapsed_s = steady[-1]["wall_time_s"] - steady[0]["wall_time_s"]
    trained = steady[-1]["agent_steps"] - steady[0]["agent_steps"]
    achieved = trained / elapsed_s
    ideal = costs.ideal_steps_per_s(cores)
    shares = sorted(name for name in steady[-1] if name.endswith("_share"))
    return {
        "cores": cores,
        "environment_ms": costs.environment_ms,
        "inference_ms": costs.inference_ms,
        "inference_rows": costs.inference_rows,
        "training_ms": costs.training_ms,
        "ideal_steps_per_s": ideal,
        "achieved_steps_per_s": achieved,
        "achieved_frames_per_s": achieved * steady[-1]["frames"] / steady[-1]["agent_steps"],
        "ratio": achieved / ideal,
        "cpu_ms_per_step": _cpu_ms_per_step(cpu, steady),
        "policy_lag": _mean(steady, "policy_lag"),
        "ranks": [rank["role"] for rank in topology["ranks"]],
        "stages": {name[: -len("_share")]: _mean(steady, name) for name in shares},
    }


def _total_ms(figures: dict[str, Any]) -> float:
    return float(figures["environment_ms"] + figures["inference_ms"] + figures["training_ms"])


def _print(figures: dict[str, Any]) -> None:
    console = Console()
    table = Table(title="where time goes (share of each rank's time)", title_justify="left")
    table.add_column("stage")
    table.add_column("share", justify="right")
    for name, share in figures["stages"].items():
        table.add_row(name, f"{100 * share:.1f} %")
    console.print(table)
    table = Table(title="rate", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, text in (
        ("environment, one core", f"{figures['environment_ms']:.3f} ms per agent step"),
        (
            f"inference of {figures['inference_rows']} rows, one core",
            f"{figures['inference_ms']:.3f} ms per agent step",
        ),
        ("training, one core", f"{figures['training_ms']:.3f} ms per agent step"),
        ("all of it, one core", f"{_total_ms(figures):.3f} ms per agent step"),
        ("CPU time that was used", f"{figures['cpu_ms_per_step'] or 0:.3f} ms per agent step"),
        (f"ideal, {figures['cores']} cores", f"{figures['ideal_steps_per_s']:.0f} agent steps/s"),
        ("achieved", f"{figures['achieved_steps_per_s']:.0f} agent steps/s"),
        ("achieved", f"{figures['achieved_frames_per_s']:.0f} frames/s"),
        ("ratio", f"{figures['ratio']:.3f}"),
    ):
        table.add_row(label, text)
    console.print(table)
