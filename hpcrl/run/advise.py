"""`hpcrl advise`: which side of a run waits, and what to change, from its directory alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpcrl.durable import reason
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir, RunDirError

_IDLE = 0.2
"""A learner that waits less than this share of its time is what the others wait for."""

_BUSY = 0.5
"""Of two sides that work in turn the one with more than this share holds the other up; a rank
that works for less, while nobody holds it up, waits for messages."""

_STUCK = 0.25
"""Acting that waits this share of its time for credits, while the learner waits for unrolls, has
them on their way."""

_DROPPED = 0.05
"""A share of unrolls dropped as stale that is worth a line."""

_MOST = 8
"""No more than so many times as many ranks are suggested at once."""


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


@dataclass(frozen=True)
class Shape:
    """How a run is laid out.

    Attributes:
      layout: the configured one.
      local: workers act by themselves, so that there are no inference ranks.
      ranks: how many there are of each role; empty where it is not known.
    """

    layout: str = "seed"
    local: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)

    def more(self, key: str, role: str, factor: float) -> str:
        """Say which count to raise, from what to what."""
        now = self.ranks.get(role, 0)
        if not now:
            return f"topology.{key}"
        to = max(now + 1, math.ceil(round(now * min(factor, _MOST), 6)))
        return f"topology.{key} (from {now} to about {to})"


class Work(NamedTuple):
    """Shares of the time in which the learner does not hold acting up.

    Attributes:
      step: actors or workers step environments.
      sent: actors pack and send what these give.
      network: the policy's network is evaluated.
      moved: whoever evaluates it copies rows and unrolls.
    """

    step: float
    sent: float
    network: float
    moved: float

    @property
    def text(self) -> str:
        """The figures in words."""
        return (
            f"environments step {self.step:.0%}, the policy is evaluated {self.network:.0%}, rows "
            f"are packed and copied {max(self.sent, self.moved):.0%} of the time"
        )


def steady_means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of the later half of the records, where the start is forgotten."""
    later = records[len(records) // 2 :]
    names = {name for record in later for name, value in record.items() if _is_number(value)}
    series = {name: [r[name] for r in later if _is_number(r.get(name))] for name in names}
    return {name: sum(values) / len(values) for name, values in series.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def advise(means: Mapping[str, float], shape: Shape) -> Advice:
    """Name the side that the others wait for.

    Args:
      means: of metrics, by name.
      shape: of the run.
    """

    def share(*names: str) -> float:
        return sum(means.get(f"{name}_share", 0.0) for name in names)

    if "worker_exchange_share" in means:
        return _gradient_workers(share, shape)
    waits, reduces = share("learner_wait"), share("learner_all_reduce")
    blocked, held = share("inference_blocked"), share("inference_held")
    learner = f"the learner waits {waits:.0%} of its time"
    if waits < _IDLE and reduces > _BUSY:
        return Advice(
            "network",
            f"{learner} and spends {reduces:.0%} in the all-reduce of gradients",
            "raise learner.batch_unrolls, or use fewer topology.learners",
        )
    if waits < _IDLE or blocked + held > max(_BUSY, waits):
        return _learner(f"{learner}, acting is held back {blocked + held:.0%}", held, means, shape)
    if blocked > _STUCK:
        return Advice(
            "network",
            f"{learner} for unrolls, and acting waits {blocked:.0%} for them to leave",
            "raise learner.queue_unrolls and inference.credits_unrolls, add topology.learners "
            "that share the unrolls, or place them on the nodes of those that act",
        )
    free = max(1.0 - blocked - held, 1e-3)
    work = Work(
        share("actor_step") / free,
        share("actor_pack", "actor_send") / free,
        share("inference_forward", "inference_weights") / free,
        share("inference_batch", "inference_scatter", "inference_unroll") / free,
    )
    return _acting(f"{learner}, {work.text}", work, 1 / max(1 - waits, 1e-3), shape)


def _gradient_workers(share: Callable[..., float], shape: Shape) -> Advice:
    """Name what takes most of the time of workers that also compute gradients.

    Learners only apply these, so that they wait most of the time in a healthy run.
    """
    waits = share("learner_wait")
    parts = {
        "environments": share("actor_step"),
        "inference": share("inference_batch", "inference_forward", "inference_unroll"),
        "learner": share("worker_copy", "worker_forward_backward"),
        "network": share("worker_exchange"),
    }
    figures = (
        f"workers step environments {parts['environments']:.0%}, evaluate the policy "
        f"{parts['inference']:.0%}, compute gradients {parts['learner']:.0%} and exchange them "
        f"{parts['network']:.0%} of the time; learners wait {waits:.0%}"
    )
    if waits < _IDLE:
        shards = shape.more("learners", "learner", 1 / _IDLE)
        return Advice("learner", figures, f"raise {shards}: each applies a smaller shard")
    first = max(parts, key=lambda name: parts[name])
    workers = f"raise {shape.more('actors', 'worker', 2)}, on more cores"
    changes = {
        "environments": workers,
        "inference": f"{workers}, or env.envs_per_actor",
        "learner": f"{workers}, or set learner.precision bfloat16",
        "network": "raise learner.batch_unrolls or learner.unroll_steps, so that gradients are "
        f"fewer, or {shape.more('learners', 'learner', 2)}",
    }
    return Advice(first, figures, changes[first])


def _learner(figures: str, held: float, means: Mapping[str, float], shape: Shape) -> Advice:
    held_back = held + means.get("inference_blocked_share", 0.0)
    change = shape.more("learners", "learner", 1 / max(1 - held_back, 1e-3))
    passes = ", fewer agent.epochs" if shape.layout == "sync" else ""
    return Advice(
        "learner",
        figures,
        f"raise {change}, set learner.precision bfloat16{passes}, or use fewer topology.actors",
    )


def _acting(figures: str, work: Work, wanted: float, shape: Shape) -> Advice:
    """Name the side of acting that is busiest; the learner could take `wanted` times as much."""
    acting, serving = work.step + work.sent, work.network + work.moved
    if max(acting + serving if shape.local else max(acting, serving), 0.0) < _BUSY:
        return Advice(
            "network",
            f"{figures}: nobody is busy, messages take the rest",
            "send fewer, larger messages (env.envs_per_actor), keep two in turn (env.groups: 2), "
            "or place actors on the nodes of their inference ranks",
        )
    largest = max(work.step, work.sent, work.network, work.moved)
    if shape.local:
        first = {work.step: "environments", work.network: "inference"}.get(largest, "network")
    elif acting >= serving:
        first = "environments" if work.step >= work.sent else "network"
    else:
        first = "inference" if work.network >= work.moved else "network"
    return Advice(first, figures, _changes(first, wanted, shape))


def _changes(first: str, wanted: float, shape: Shape) -> str:
    workers = shape.more("actors", "worker", wanted)
    if first == "environments":
        actors = workers if shape.local else shape.more("actors", "actor", wanted)
        return f"raise {actors}, on more cores"
    if first == "inference" and shape.local:
        return f"raise {workers}, on more cores, or env.envs_per_actor"
    inference = shape.more("inference", "inference", wanted)
    if first == "inference":
        return (
            f"raise {inference}, set inference.precision bfloat16, or let batches grow "
            "(inference.max_wait_s, env.envs_per_actor)"
        )
    if shape.local:
        return f"raise {workers}, or let environments give smaller observations (uint8)"
    return (
        f"raise {inference}, let workers act where observations are (layout: impala, or placement: "
        "local), or let environments give smaller ones (uint8, one frame of a stack)"
    )


def freshness_lines(means: Mapping[str, float], newest: Mapping[str, Any]) -> list[str]:
    """Return how old unrolls are, and what a bound on that costs.

    Args:
      means: of metrics, by name.
      newest: the last record, for totals.
    """
    lines = []
    if means.get("gradient_lag") is not None:
        most, lost = newest.get("gradient_lag_max") or 0, newest.get("dropped_gradients") or 0
        lines.append(
            f"gradient lag: {means['gradient_lag']:.1f} versions of a shard, at most {most:.0f}, "
            f"{lost:.0f} gradients dropped; learner.max_gradient_lag bounds it, fewer "
            "topology.actors lower it"
        )
    elif means.get("policy_lag", 0.0) > 0:
        lines.append(
            f"policy lag: {means['policy_lag']:.1f} learner steps, at most "
            f"{newest.get('policy_lag_max') or 0:.0f}; lower it with learner.max_policy_lag, "
            "learner.queue_unrolls and inference.credits_unrolls"
        )
    dropped, unrolls = newest.get("stale_unrolls_dropped") or 0, means.get("unrolls_per_s", 0.0)
    made = unrolls * (newest.get("wall_time_s") or 0.0)
    if made and dropped / made > _DROPPED:
        lines.append(
            f"{dropped:,} unrolls were dropped as stale, about {dropped / made:.0%} of all: raise "
            "learner.max_policy_lag, or use fewer environments per learner.batch_unrolls"
        )
    return lines


def read_shape(run_dir: Path) -> Shape:
    """Return how a run is laid out, as far as its directory tells.

    Raises:
      RunDirError: a file is there and can't be read.
    """
    run = RunDir(run_dir)
    path = run.topology
    try:
        topology = json.loads(path.read_text("utf-8")) if path.exists() else {}
        local = topology.get("placement") == "local"
        ranks = Counter(rank["role"] for rank in topology.get("ranks", ()))
        path = run.config
        config = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
        return Shape(str(config.get("layout", "seed")), local, ranks)
    except OSError as error:
        raise RunDirError(f"can't read {path}: {reason(error)}") from None
    except (ValueError, yaml.YAMLError, AttributeError, TypeError, KeyError):
        raise RunDirError(f"{path} is damaged: it does not say how the run is laid out") from None


def advice_lines(run_dir: Path) -> list[str]:
    """Return the advice on a run in words.

    Raises:
      RunDirError: its files can't be read, or there are no metrics yet.
    """
    records = read_metrics(run_dir)
    if not records:
        raise RunDirError(f"{run_dir} holds no metrics yet: advice needs at least one record")
    means = steady_means(records)
    bottleneck, figures, change = advise(means, read_shape(run_dir))
    lines = [f"bottleneck: {bottleneck} ({figures})", f"try: {change}"]
    return lines + freshness_lines(means, records[-1])
