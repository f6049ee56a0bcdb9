"""What the user asks of the topology, and what the chosen layout needs."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic.dataclasses import dataclass

from hpcrl.config.types import STRICT, NonNegative

Role = Literal["learner", "inference", "actor", "worker", "follower", "evaluator"]
"""What a rank does for the whole run; see `docs/architecture.md`."""

ROLES: tuple[Role, ...] = ("learner", "inference", "actor", "worker", "follower", "evaluator")

Placement = Literal["central", "local"]
"""Where actions are chosen: on inference ranks ("central") or by the worker itself ("local")."""

DeviceNeed = Literal["auto", "cpu", "gpu"]
"""Device of a role: a GPU where one is free ("auto"), never ("cpu"), or nothing else ("gpu")."""


class TopologyError(ValueError):
    """The asked roles cannot be laid out on the ranks and GPUs that exist (exit code 2)."""


def _reject_bool(value: Any) -> Any:
    # YAML reads `yes` and `on` as true, which would silently become one rank.
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a count: give an integer, a fraction or auto")
    return value


def _check_count(value: int | float | str) -> int | float | str:
    if isinstance(value, float) and not 0.0 <= value < 1.0:
        raise ValueError(
            f"{value} is not a fraction of the world size: it must be in [0, 1); "
            "a number of ranks is written without a decimal point"
        )
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{value} ranks: a count must be 0 or more")
    return value


Count = Annotated[
    int | float | Literal["auto"], BeforeValidator(_reject_bool), AfterValidator(_check_count)
]
"""An integer counts ranks, a float in (0, 1) is a share of the world size (at least one rank)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TopologyConfig:
    """How many ranks take each role."""

    learners: Count = "auto"
    """Learner ranks: a count, a fraction of the world size, or auto: one per node with GPUs, or
    one per node where there are none, fewer where the world or the batch is too small."""
    inference: Count = "auto"
    """Inference ranks: a count, a fraction, or auto: about one per 16 actors, at least one per
    learner and per node that can serve (one with free GPUs, any node without GPUs), at most
    one per free GPU; where actors are given, what they leave. 0 or auto for local layouts."""
    actors: Count = "auto"
    """Ranks that step environments (actors, or workers in local layouts): a count, a fraction,
    or auto: every rank that has no other role. With `env.ranks_per_env` above 1 each of them
    leads a team of that many ranks."""
    evaluators: Count = "auto"
    """Evaluator ranks: a count, a fraction, or auto: none."""
    ranks: NonNegative = 0
    """Ranks that hpcrl starts when it starts its own mpirun; 0: the sum of the counts, with
    automatic actors on the cores that are left (at least 2)."""
    allow_gpu_sharing: bool = False
    """Whether several learner and inference ranks may use one GPU; if not, a rank that finds no
    GPU left uses the CPU."""


@plain_dataclass(frozen=True)
class RoleDemand:
    """What the chosen layout and agent need of the topology.

    Attributes:
      placement: "central" uses actor, inference and learner ranks; "local" uses worker and
        learner ranks. Both may have evaluators.
      learner_device: device of the learner ranks.
      inference_device: device of the inference ranks.
      batch_unrolls: global batch; an automatic number of learners divides it. None where
        any number of learners will do.
      ranks_per_env: P, ranks that step one environment together: an acting rank, which leads,
        and P-1 followers.
      sharded: each learner holds a shard of the parameters, so that each worker talks to all of
        them; there are no evaluators.
    """

    placement: Placement = "central"
    learner_device: DeviceNeed = "auto"
    inference_device: DeviceNeed = "auto"
    batch_unrolls: int | None = None
    ranks_per_env: int = 1
    sharded: bool = False

    @property
    def acting_role(self) -> Role:
        """The role of the ranks that step environments for training."""
        return "actor" if self.placement == "central" else "worker"

    @property
    def server_role(self) -> Role:
        """The role that the acting ranks talk to."""
        return "inference" if self.placement == "central" else "learner"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that may occur, in the order of the world-size equation."""
        followers: tuple[Role, ...] = ("follower",) if self.ranks_per_env > 1 else ()
        if self.placement == "central":
            return ("learner", "inference", "actor", *followers, "evaluator")
        evaluators: tuple[Role, ...] = () if self.sharded else ("evaluator",)
        return ("learner", "worker", *followers, *evaluators)

    def weight(self, role: Role) -> int:
        """Return the ranks that one of `role` takes, its followers included."""
        return self.ranks_per_env if role == self.acting_role else 1

    def device_need(self, role: Role) -> DeviceNeed:
        """Return the device need of `role`; acting and evaluating ranks use the CPU."""
        if role == "learner":
            return self.learner_device
        return self.inference_device if role == "inference" else "cpu"
