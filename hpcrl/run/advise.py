"""`hpcrl advise`: which side of a run waits, and what to change, from its metrics alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir, RunDirError

_IDLE = 0.2
"""A learner that waits less than this share of its time is what the others wait for."""

_BUSY = 0.5
"""A side that works for more than this share of its time is taken to hold the run up."""

_INFERENCE_WORK = ("batch", "forward", "scatter", "unroll", "weights")


class Advice(NamedTuple):
    """What holds a run up.

    Attributes:
      bottleneck: environments, inference, learner or network.
      figures: what says so.
      change: what to try first.
    """

    bottleneck: str
    figures: str
    change: str


def steady_means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of the later half of the records, where the start is forgotten."""
    later = records[len(records) // 2 :]
    names = {name for record in later for name, value in record.items() if _is_number(value)}
    series = {name: [r[name] for r in later if _is_number(r.get(name))] for name in names}
    return {name: sum(values) / len(values) for name, values in series.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def advise(means: Mapping[str, float], local: bool = False) -> Advice:
    """Name the side that the others wait for.

    Args:
      means: of metrics, by name.
      local: workers act by themselves, so that there are no inference ranks.
    """

    def share(name: str) -> float:
        return means.get(f"{name}_share", 0.0)

    waits, reduces = share("learner_wait"), share("learner_all_reduce")
    held_back = share("inference_blocked") + share("inference_held")
    stepping, work = share("actor_step"), sum(share(f"inference_{s}") for s in _INFERENCE_WORK)
    learner = f"the learner waits {waits:.0%} of its time"
    if waits < _IDLE and reduces > _BUSY:
        return Advice(
            "network",
            f"{learner} and spends {reduces:.0%} in the all-reduce of gradients",
            "raise learner.batch_unrolls, or use fewer topology.learners",
        )
    if waits < _IDLE:
        return Advice(
            "learner",
            f"{learner}, acting is held back {held_back:.0%} of its time",
            "add topology.learners, set learner.precision bfloat16, or use fewer topology.actors",
        )
    sides = f"{learner}, environments step {stepping:.0%}, inference works {work:.0%} of the time"
    if stepping >= max(_BUSY, work):
        return Advice("environments", sides, "add topology.actors, on more cores")
    if work >= _BUSY:
        if local:
            change = "add topology.actors, on more cores, or raise env.envs_per_actor"
            return Advice("inference", sides, change)
        return Advice(
            "inference",
            sides,
            "add topology.inference ranks, set inference.precision bfloat16, or let batches grow "
            "(inference.max_wait_s, env.envs_per_actor)",
        )
    return Advice(
        "network",
        f"{sides}: neither is busy, messages between them take the rest",
        "send fewer, larger messages (env.envs_per_actor), keep two in turn (env.groups: 2), or "
        "place actors on the nodes of their inference ranks",
    )


def advice_lines(run_dir: Path) -> list[str]:
    """Return the advice on a run in words.

    Raises:
      RunDirError: its metrics can't be read, or there are none yet.
    """
    records = read_metrics(run_dir)
    if not records:
        raise RunDirError(f"{run_dir} holds no metrics yet: advice needs at least one record")
    means = steady_means(records)
    topology = RunDir(run_dir).topology
    local = topology.exists() and json.loads(topology.read_text())["placement"] == "local"
    bottleneck, figures, change = advise(means, local)
    lines = [f"bottleneck: {bottleneck} ({figures})", f"try: {change}"]
    if means.get("policy_lag", 0.0) > 0:
        lag = f"policy lag: {means['policy_lag']:.1f} learner steps"
        lines.append(f"{lag}; lower it with learner.queue_unrolls and inference.credits_unrolls")
    return lines
