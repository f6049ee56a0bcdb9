"""What each stage of a job costs one core, measured alone while all cores do the same.

Cores share caches and memory, and two of them may be one: so as many processes as there are
cores measure at the same time, and their mean counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from hpcrl.bench import costs
from hpcrl.bench.ranks import BenchError, benchmark_script, run_ranks
from hpcrl.brain import Brain
from hpcrl.comm.wire import step_layout, step_short_nbytes, unroll_layout
from hpcrl.config.load import parse_config, to_dict
from hpcrl.config.root import Config
from hpcrl.job import ACTOR_STAGES
from hpcrl.learning.batches import assemble
from hpcrl.learning.optim import FlatParameters
from hpcrl.node.torch_device import keep_freed_memory
from hpcrl.specs import EnvSpec
from hpcrl.start.local_launch import launch_environment

_START_S = 120.0


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one core, but for sleeping, and bytes.

    Attributes:
      env_s: computing one environment's step.
      env_sleep_s: of the same step, time in which it leaves the core to others.
      env_spread: standard deviation of a group's step over its mean.
      act_batch_s: choosing actions, whatever the batch's size.
      act_row_s: choosing actions, per row.
      record_row_s: appending a row to its unroll.
      message_s: a step message and its reply, at both ends together.
      assemble_s: a learner's share of a batch, from its slots to one tensor per field.
      train_s: a learner's step on its share.
      weights_s: taking over a copy of the weights.
      step_bytes: a step message.
      unroll_bytes: an unroll.
      weights_bytes: a copy of the weights.
    """

    env_s: float
    env_sleep_s: float
    env_spread: float
    act_batch_s: float
    act_row_s: float
    record_row_s: float
    message_s: float
    assemble_s: float
    train_s: float
    weights_s: float
    step_bytes: float
    unroll_bytes: float
    weights_bytes: float

    @classmethod
    def mean(cls, several: list[StageCosts]) -> StageCosts:
        """Return the mean of measurements."""
        names = [field.name for field in fields(cls)]
        return cls(**{n: float(np.mean([getattr(c, n) for c in several])) for n in names})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageCosts:
        """Read what `asdict` gave.

        Raises:
          BenchError: a cost is missing, negative or unknown.
        """
        names = {field.name for field in fields(cls)}
        wrong = sorted(names ^ data.keys())
        if wrong:
            raise BenchError(f"stage costs must have the keys {sorted(names)}; wrong: {wrong}")
        bad = {n: v for n, v in data.items() if not (isinstance(v, int | float) and v >= 0)}
        if bad:
            raise BenchError(f"stage costs must be numbers from 0 on, got {bad}")
        return cls(**data)


def used_s(call: Callable[[], object], seconds: float) -> float:
    """Return the median processor seconds of a call: what others use doesn't count."""
    call()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end_s:
        start_s = time.process_time()
        call()
        times.append(time.process_time() - start_s)
    return float(np.median(times))


def _environment(config: Config, seconds: float) -> tuple[EnvSpec, dict[str, float]]:
    envs = costs.Environments(config)
    walls: list[float] = []
    cpus: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(walls) < 10 or time.perf_counter() < end_s:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        envs.step()
        walls.append(time.perf_counter() - start_s)
        cpus.append(time.process_time() - start_cpu_s)
    envs.close()
    wall_s, cpu_s = float(np.median(walls)), float(np.mean(cpus))
    # A step that computes has the core all the time, unless others want it, too.
    sleep_s = wall_s - cpu_s if cpu_s < 0.25 * wall_s else 0.0
    return envs.spec, {
        "env_s": cpu_s / envs.rows,
        "env_sleep_s": sleep_s / envs.rows,
        "env_spread": float(np.std(cpus)) / (sleep_s + cpu_s),
    }


def acting_rows(config: Config, full_rows: int) -> tuple[int, int]:
    """Return two sizes of batches between and beyond which costs are on a line."""
    one = config.env.envs_per_actor // config.env.groups
    return one, max(full_rows, 2 * one)


def _acting(config: Config, spec: EnvSpec, full_rows: int, seconds: float) -> dict[str, float]:
    few, many = acting_rows(config, full_rows)
    act_s: dict[int, list[float]] = {few: [], many: []}
    record_s: list[float] = []
    for rows, taken in act_s.items():
        policy, batch = costs.acting_policy(config, spec, rows)
        end_s = time.perf_counter() + seconds / 2
        while len(taken) < 10 or time.perf_counter() < end_s:
            start_s = time.process_time()
            policy.act(batch)
            taken.append(time.process_time() - start_s)
            policy.record()
            record_s.append((time.process_time() - start_s - taken[-1]) / rows)
    few_s, many_s = (float(np.median(taken)) for taken in act_s.values())
    row_s = min(max((many_s - few_s) / (many - few), 0.0), many_s / many)
    return {
        "act_batch_s": many_s - many * row_s,
        "act_row_s": row_s,
        "record_row_s": float(np.mean(record_s)),
    }


def _learning(
    config: Config, spec: EnvSpec, learners: int, seconds: float
) -> dict[str, float | int]:
    brain = Brain(config, spec)
    unrolls = config.learner.batch_unrolls // learners
    network = brain.make_network(0)
    items = brain.window.items_per_unroll if brain.window else 0
    steps = config.learner.unroll_steps
    layout = unroll_layout(spec, brain.behaviour, steps, network.state_size, items)
    flat = FlatParameters(network).value
    copy = flat.clone()
    train = costs.training_call(config, spec, learners)
    if brain.window:
        # Sampled rows are copied once, at nearly the speed of memcpy (benchmarks/replay.py).
        batch = costs.random_batch(config, spec, brain, unrolls)
        leaves = [leaf.numpy() for leaf in batch.observation.values()]
        targets = [np.empty_like(leaf) for leaf in leaves]

        def collect() -> None:
            for leaf, target in zip(leaves, targets, strict=True):
                np.copyto(target, leaf)
    else:
        buffer = layout.buffer(unrolls)
        buffer[:] = 0
        views, slots = layout.views(buffer), np.arange(unrolls)

        def collect() -> None:
            assemble(views, slots, spec, brain.behaviour)

    rows = config.env.envs_per_actor // config.env.groups
    return {
        "assemble_s": used_s(collect, seconds / 4),
        "train_s": used_s(train, seconds),
        "weights_s": used_s(lambda: flat.copy_(copy), seconds / 10),
        "step_bytes": step_short_nbytes(spec, step_layout(spec, rows, len(ACTOR_STAGES))),
        "unroll_bytes": layout.nbytes,
        "weights_bytes": flat.numel() * flat.element_size(),
    }


def measure_here(
    config: Config, full_rows: int, learners: int, seconds: float
) -> dict[str, float | int]:
    """Measure all but the messages in this process, with one thread."""
    keep_freed_memory()
    torch.set_num_threads(1)
    spec, found = _environment(config, seconds)
    more = _learning(config, spec, learners, seconds)
    return {**found, **_acting(config, spec, full_rows, seconds), **more}


def measure_stages(config: Config, full_rows: int, learners: int, seconds: float) -> StageCosts:
    """Measure all stages while every core is busy with the same.

    Args:
      config: the configuration.
      full_rows: of a batch of actions.
      learners: that share the global batch.
      seconds: of each stage.
    """
    text = json.dumps(
        {"config": to_dict(config), "rows": full_rows, "learners": learners, "seconds": seconds}
    )
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "hpcrl.bench.stage_costs", text]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=launch_environment(1))
        for _ in range(cores)
    ]
    limit_s = time.monotonic() + _START_S + 20 * seconds
    try:
        outputs = [w.communicate(timeout=limit_s - time.monotonic())[0] for w in workers]
    except subprocess.TimeoutExpired:
        raise BenchError(f"measuring costs took over {_START_S + 20 * seconds:.0f} s") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        raise BenchError("a process that measured costs failed; its message is above")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    message_s = message_cost(config, found[0]["step_bytes"])
    return StageCosts.mean([StageCosts(**one, message_s=message_s) for one in found])


def message_cost(config: Config, step_bytes: float) -> float:
    """Return the seconds of a step message and its reply, copies at both ends included."""
    rows = config.env.envs_per_actor // config.env.groups
    arguments = {
        "cases": [[max(1, round(step_bytes / rows)), rows]],
        **{"seconds": 0.3, "rounds": 3, "wait": "yield", "cores": 2},
    }
    program = [str(benchmark_script("wire_ranks.py"))]
    case = run_ranks(program, 2, arguments, _START_S)["cases"][0]
    return 1e-6 * float(case["hpcrl_with_copies"]["p10_us"])


def main() -> None:
    """Measure in this process and print the costs."""
    asked = json.loads(sys.argv[1])
    config = parse_config(asked["config"])
    print(json.dumps(measure_here(config, asked["rows"], asked["learners"], asked["seconds"])))


if __name__ == "__main__":
    main()
