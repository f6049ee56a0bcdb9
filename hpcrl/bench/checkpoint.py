"""`hpcrl bench checkpoint`: how long checkpoints and publishing weights hold a learner up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.bench.learner import CHECKPOINT_GOAL, STALL_GOAL, flood_learner
from hpcrl.bench.ranks import BenchError
from hpcrl.bench.result import Chart, Result, Sheet
from hpcrl.config.load import load_config


def bench_checkpoint(path: str, overrides: Sequence[str], seconds: float) -> Result:
    """Flood one learner with unrolls while it writes a checkpoint every sixth of the time.

    Args:
      path: the configuration.
      overrides: of its keys.
      seconds: of training.

    Raises:
      BenchError: no checkpoint was written while it trained.
    """
    return summarise(flood_learner(load_config(path, overrides), seconds))


def summarise(found: Mapping[str, Any]) -> Result:
    """Return the result of what the ranks found."""
    learner = found["learners"][0]
    stall_steps = learner["checkpoint_stall_steps"]
    if stall_steps is None:
        raise BenchError("no checkpoint was written while the learner trained: give --seconds more")
    stall_ms = stall_steps * learner["step_ms"]
    rows = [
        ("a learner step, ms", learner["step_ms"]),
        ("a step with a checkpoint takes longer by, ms", stall_ms),
        (f"the same in steps (goal <= {CHECKPOINT_GOAL:g})", stall_steps),
        (f"publishing weights, share of a step (goal <= {STALL_GOAL})", learner["publish_share"]),
    ]
    bars = [("checkpoint", stall_steps), ("publishing weights", learner["publish_share"])]
    return Result(
        "checkpoint",
        stall_steps,
        f"learner steps that a checkpoint holds training up (goal <= {CHECKPOINT_GOAL:g}), "
        f"median of {learner['checkpoints']}",
        {"stall_ms": stall_ms, **learner},
        [Sheet(f"{learner['parameters']:,} parameters", ("", ""), rows)],
        [Chart("stalls of a learner", "", "learner steps", {"stall": bars}, "bars")],
    )
