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
from typing import Any, NamedTuple

import psutil

from hpcrl.bench.costs import Costs, measure
from hpcrl.bench.ranks import BenchError, end_family
from hpcrl.bench.result import Chart, Result, Sheet
from hpcrl.config.root import Config
from hpcrl.job import ACTOR_STAGES, GRADIENT_STAGES, INFERENCE_STAGES, LEARNER_STAGES
from hpcrl.layouts import rules_of
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir
from hpcrl.start.training import read_training_config
from hpcrl.timing import StageTimer

_COST_S = 3.0
_STAGES = {
    "actor": ACTOR_STAGES,
    "inference": INFERENCE_STAGES,
    "worker": GRADIENT_STAGES,
    "learner": LEARNER_STAGES,
}


class CpuTimes(NamedTuple):
    """The processors' time at a moment: seconds that all ranks used, and that nobody used."""

    unix_s: float
    ranks_s: float
    idle_s: float


def bench_system(
    path: str,
    overrides: Sequence[str],
    seconds: float,
    warm_up_s: float,
    cost_s: float = _COST_S,
) -> Result:
    """Measure costs, train, measure costs again.

    Args:
      path: the configuration, of any layout.
      overrides: of its keys.
      seconds: of steady training.
      warm_up_s: of training before that.
      cost_s: of each measurement of a cost.

    Raises:
      ConfigError: the configuration can't be used.
      BenchError: training failed, or too little of it was seen.
    """
    config = read_training_config(path, overrides)
    # A gradient is of one whole batch where learners hold shards.
    alone = config.topology.learners == "auto" or rules_of(config).asynchronous_gradients
    learners = 1 if alone else int(config.topology.learners)
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        first = measure(config, _guess_rows(config), learners, cost_s)
        run = Path(folder) / "run"
        cpu = train(path, overrides, run, seconds, warm_up_s)
        steady = [r for r in read_metrics(run) if r["wall_time_s"] >= warm_up_s]
        topology = json.loads(RunDir(run).topology.read_text())
    if len(steady) < 2:
        raise BenchError(f"{seconds:g} s hold no two records of metrics: give --seconds more")
    rows = max(1, round(mean(steady, "batch_rows")))
    second = measure(config, rows, learners, cost_s)
    return _result(summarise(config, first, second, steady, topology, cpu))


def _guess_rows(config: Config) -> int:
    return config.env.envs_per_actor // config.env.groups


def train(
    path: str, overrides: Sequence[str], run: Path, seconds: float, warm_up_s: float
) -> list[CpuTimes]:
    """Train; return samples of the processors' time."""
    stop = ["--stop.wall_time_s", str(warm_up_s + seconds), "--metrics.every_s", "1"]
    stop += ["--stop.mean_return", "null", "--checkpoint.every_s", "0"]
    command = [sys.executable, "-m", "hpcrl", "train", path, *overrides, "--run.dir", str(run)]
    samples = []
    with subprocess.Popen([*command, *stop]) as process:
        try:
            while process.poll() is None:
                idle_s = psutil.cpu_times().idle
                samples.append(CpuTimes(time.time(), _cpu_s(process.pid), idle_s))
                time.sleep(1.0)
        except BaseException:
            end_family(process)
            raise
    if process.returncode != 0:
        raise BenchError(f"the training run ended with code {process.returncode}")
    return samples


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


def cpu_use(
    samples: Sequence[CpuTimes], steady: Sequence[dict[str, Any]], cores: int
) -> dict[str, float | None]:
    """Return where the processors' time went while `steady` was recorded.

    Returns:
      `cpu_ms_per_step`: of all ranks, per agent step; `idle_share` of the cores' time;
      `others_share`: that of all other programs on the machine. None where too little was seen.
    """
    first, last = steady[0], steady[-1]
    inside = [s for s in samples if first["time_unix_s"] <= s.unix_s <= last["time_unix_s"]]
    if len(inside) < 2:
        return dict.fromkeys(("cpu_ms_per_step", "idle_share", "others_share"))
    elapsed_s = inside[-1].unix_s - inside[0].unix_s
    ranks = (inside[-1].ranks_s - inside[0].ranks_s) / elapsed_s
    idle = (inside[-1].idle_s - inside[0].idle_s) / elapsed_s
    rate = (last["agent_steps"] - first["agent_steps"]) / (
        last["wall_time_s"] - first["wall_time_s"]
    )
    return {
        "cpu_ms_per_step": 1e3 * ranks / max(rate, 1e-9),
        "idle_share": idle / cores,
        "others_share": max(0.0, 1 - (ranks + idle) / cores),
    }


def mean(records: Sequence[dict[str, Any]], name: str) -> float:
    """Return the mean of a metric over the records that have it, 0 where none does."""
    values = [r[name] for r in records if r.get(name) is not None]
    return sum(values) / len(values) if values else 0.0


def summarise(
    config: Config,
    first: Costs,
    second: Costs,
    steady: Sequence[dict[str, Any]],
    topology: dict[str, Any],
    cpu: Sequence[CpuTimes],
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
    shares = stage_shares(config, steady, topology)
    return {
        "layout": config.layout,
        "precision": config.learner.precision,
        "cores": cores,
        "environment_ms": costs.environment_ms,
        "inference_ms": costs.inference_ms,
        "inference_rows": costs.inference_rows,
        "training_ms": costs.training_ms,
        "ideal_steps_per_s": ideal,
        "achieved_steps_per_s": achieved,
        "achieved_frames_per_s": achieved * steady[-1]["frames"] / steady[-1]["agent_steps"],
        "ratio": achieved / ideal,
        **cpu_use(cpu, steady, cores),
        "policy_lag": mean(steady, "policy_lag"),
        "ranks": [rank["role"] for rank in topology["ranks"]],
        "stages": shares,
        "timer_share": timer_share(shares, _marks_per_s(config, steady, topology)),
    }


def stage_shares(
    config: Config, steady: Sequence[dict[str, Any]], topology: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Return each role's share of time by stage.

    Metrics count what a worker does under the names of the two roles that it is in one. They hold
    other shares, too, which are no stages.
    """
    roles = {rank["role"] for rank in topology["ranks"]}
    shares: dict[str, dict[str, float]] = {}
    for role, stages in _STAGES.items():
        for stage in stages:
            name = f"{role}_{stage}_share"
            if name not in steady[-1]:
                continue
            of = role if role in roles else "worker"
            share = mean(steady, name)
            if of == role or share or stage == "step":
                shares.setdefault(of, {})[stage] = share
    return shares


def timer_share(shares: dict[str, dict[str, float]], marks_per_s: float) -> float:
    """Return the stage timers' own share of a rank's time.

    Args:
      shares: as `stage_shares` gives them; the timer of most stages is made.
      marks_per_s: of the busiest rank.
    """
    timer = StageTimer(max((tuple(stages) for stages in shares.values()), key=len))
    stage = next(iter(timer.seconds))
    count, best_s = 2000, float("inf")
    for _ in range(10):  # the fastest: others may have had the core in between
        start_s = time.perf_counter()
        for _ in range(count):
            timer.mark(stage)
        best_s = min(best_s, (time.perf_counter() - start_s) / count)
    return marks_per_s * best_s


def _marks_per_s(config: Config, steady: Sequence[dict[str, Any]], topology: Any) -> float:
    """Marks of the busiest rank while it works; those of an idle rank cost nothing."""
    acting = sum(rank["role"] in ("actor", "worker") for rank in topology["ranks"])
    group = config.env.envs_per_actor // config.env.groups
    rows = mean(steady, "env_steps_per_s")
    serving = sum(rank["role"] in ("inference", "worker") for rank in topology["ranks"])
    batches = rows / max(mean(steady, "batch_rows"), 1e-9) / max(serving, 1)
    return max(
        len(ACTOR_STAGES) * rows / acting / group,
        len(INFERENCE_STAGES) * batches,
        len(LEARNER_STAGES) * mean(steady, "learner_steps_per_s"),
    )


def _result(figures: dict[str, Any]) -> Result:
    names = {role: figures["ranks"].count(role) for role in sorted(set(figures["ranks"]))}
    stages = figures["stages"]
    sheets = [
        Sheet(
            f"{role}: share of its time ({count} ranks)", ("stage", "share"), _percent(stages[role])
        )
        for role, count in names.items()
        if role in stages
    ]
    costs = [
        ("environment", figures["environment_ms"]),
        (f"inference of {figures['inference_rows']} rows", figures["inference_ms"]),
        ("training", figures["training_ms"]),
        ("all of it", sum(figures[f"{w}_ms"] for w in ("environment", "inference", "training"))),
        ("CPU time that was used", figures["cpu_ms_per_step"]),
    ]
    ideal, achieved = figures["ideal_steps_per_s"], figures["achieved_steps_per_s"]
    rates = [
        (f"ideal, {figures['cores']} cores", ideal),
        ("achieved", achieved),
        ("achieved, frames", figures["achieved_frames_per_s"]),
        ("policy lag, learner steps", figures["policy_lag"]),
        ("stage timers' own share", f"{100 * figures['timer_share']:.3f} %"),
        *(
            (name, f"{100 * figures[key]:.1f} %")
            for name, key in (
                ("cores idle", "idle_share"),
                ("cores used by other programs", "others_share"),
            )
            if figures[key] is not None
        ),
    ]
    bars = [
        (f"{role} {stage}", share)
        for role, shares in stages.items()
        for stage, share in shares.items()
        if share >= 0.005
    ]
    return Result(
        "system",
        figures["ratio"],
        f"training rate over the ideal of {figures['cores']} cores, {figures['layout']} layout",
        figures,
        [
            *sheets,
            Sheet("cost of an agent step, one core", ("", "ms"), costs),
            Sheet("agent steps per second", ("", "rate"), rates),
        ],
        [Chart("where time goes", "", "share of the rank's time", {"share": bars}, "bars")],
    )


def _percent(shares: dict[str, float]) -> list[tuple[str, str]]:
    return [(stage, f"{100 * share:.1f} %") for stage, share in shares.items()]
