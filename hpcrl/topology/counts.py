"""From the asked counts, fractions and "auto" to one number of ranks per role."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hpcrl.topology.config import Role, RoleDemand, TopologyConfig, TopologyError
from hpcrl.topology.nodes import NodeInfo, format_ranks

ACTORS_PER_INFERENCE = 16
"""What automatic counts aim at: enough clients for large batches, few enough messages."""

Asked = int | float | str
Counts = dict[Role, int]


def local_world_size(config: TopologyConfig, demand: RoleDemand, num_cores: int) -> int:
    """Return how many ranks hpcrl starts when it starts its own mpirun on one node.

    Args:
      config: the asked topology; `config.ranks` decides when it is not 0.
      demand: what the layout needs.
      num_cores: cores of this machine; automatic acting ranks fill them (at least 2).

    Raises:
      TopologyError: when a count is a fraction, which has no meaning before the world has
        a size.
    """
    if config.ranks:
        return config.ranks
    asked = _asked(config, demand)
    for role, value in asked.items():
        if isinstance(value, float) and value > 0.0:
            raise TopologyError(
                f"topology.{_label(role, config_key=True)} is the fraction {value} of the world "
                "size, and topology.ranks is 0: set topology.ranks, or give a count of ranks"
            )
    fixed = {role: int(value) for role, value in asked.items() if value != "auto"}
    acting, server = demand.acting_role, demand.server_role
    sizes = Counter(fixed)
    sizes["learner"] = fixed.get("learner", 1)
    if server == "inference" and "inference" not in fixed:
        left = (num_cores - sizes["learner"] - sizes["evaluator"]) // demand.ranks_per_env
        clients = fixed.get(acting, left * ACTORS_PER_INFERENCE // (ACTORS_PER_INFERENCE + 1))
        sizes["inference"] = max(sizes["learner"], math.ceil(clients / ACTORS_PER_INFERENCE))
    team = demand.ranks_per_env
    if acting not in fixed:
        sizes[acting] = max(2, sizes[server], (num_cores - sizes.total()) // team)
    return sizes.total() + (team - 1) * sizes[acting]


def resolve_counts(
    config: TopologyConfig,
    demand: RoleDemand,
    nodes: Sequence[NodeInfo],
    overrides: Mapping[int, Role],
) -> Counts:
    """Return the ranks per role; they add up to the world size.

    An automatic count follows the explicit overrides where there are any. Otherwise
    automatic actors take every rank that is left, automatic inference ranks take what
    given actors leave, and automatic learners what the two leave.

    Raises:
      TopologyError: with the whole equation, when the counts do not fit the world size or
        one another, or the overrides do not fit the counts.
    """
    world_size = sum(len(node.ranks) for node in nodes)
    asked = _asked(config, demand)
    pinned = Counter(overrides.values())
    counts: Counts = {}
    for role, value in asked.items():
        known = _known(role, value, world_size, pinned, demand)
        if known is not None:
            counts[role] = known
    _fill_automatic(counts, demand, nodes, pinned)
    _absorb_rounding(counts, asked, world_size, demand)
    if demand.ranks_per_env > 1:
        counts["follower"] = (demand.ranks_per_env - 1) * counts[demand.acting_role]
        asked["follower"] = f"{demand.ranks_per_env - 1} per {demand.acting_role}"
    counts = {role: counts[role] for role in demand.roles}
    _check(counts, asked, world_size, demand, overrides)
    return counts


def _asked(config: TopologyConfig, demand: RoleDemand) -> dict[Role, Asked]:
    if demand.placement == "local":
        if config.inference not in ("auto", 0):
            raise TopologyError(
                f"inference({config.inference}): this layout acts locally and has no inference "
                "ranks; set topology.inference to auto or 0, or choose a layout that has them"
            )
        return {
            "learner": config.learners,
            "worker": config.actors,
            "evaluator": config.evaluators,
        }
    return {
        "learner": config.learners,
        "inference": config.inference,
        "actor": config.actors,
        "evaluator": config.evaluators,
    }


def _known(
    role: Role, value: Asked, world_size: int, pinned: Mapping[Role, int], demand: RoleDemand
) -> int | None:
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        share = value * world_size / demand.weight(role)
        return max(1, math.floor(share + 0.5)) if value > 0.0 else 0
    if role == "evaluator" or (role != demand.acting_role and pinned.get(role)):
        return pinned.get(role, 0)
    return None


def _fill_automatic(
    counts: Counts, demand: RoleDemand, nodes: Sequence[NodeInfo], pinned: Mapping[Role, int]
) -> None:
    world_size = sum(len(node.ranks) for node in nodes)
    acting = demand.acting_role
    roles = [role for role in demand.roles if role != "follower"]
    for role in roles:
        if role in counts:
            continue
        unknown = [other for other in roles if other not in counts]
        left = world_size - sum(demand.weight(known) * counts[known] for known in counts)
        if unknown == [role]:
            most = _most(role, counts, demand)
            fitting = left // demand.weight(role)
            fitting = fitting if most is None else min(fitting, most)
            counts[role] = max(fitting, _least(role, counts, demand))
        elif role == "learner":
            needed = sum(demand.weight(other) for other in unknown)
            counts[role] = _auto_learners(counts, needed, left, demand, nodes)
        else:
            movable = left - pinned.get(acting, 0)
            counts[role] = _auto_inference(counts["learner"], left, movable, demand, nodes)


def _auto_learners(
    counts: Counts, needed: int, left: int, demand: RoleDemand, nodes: Sequence[NodeInfo]
) -> int:
    """One per node with GPUs (per node where there are none), within what the world allows."""
    with_gpus = sum(1 for node in nodes if node.num_gpus)
    sites = with_gpus if with_gpus and demand.learner_device != "cpu" else len(nodes)
    # Each learner needs one of every role that is still to be counted.
    bounds = [sites, left // needed]
    bounds += [counts[role] for role in ("inference", demand.acting_role) if role in counts]
    learners = max(1, min(bounds))
    if demand.batch_unrolls is not None:
        while demand.batch_unrolls % learners:
            learners -= 1
    return learners


def _auto_inference(
    learners: int, left: int, movable: int, demand: RoleDemand, nodes: Sequence[NodeInfo]
) -> int:
    """About one per ACTORS_PER_INFERENCE actors, the same number on each node that serves.

    `left` ranks are for inference and actors together; `movable` of them are not pinned.
    """
    team = demand.ranks_per_env
    sites, most = len(nodes), min(left // (1 + team), movable)
    if demand.inference_device != "cpu":
        free_gpus = sum(node.gpu_slots for node in nodes)
        if demand.learner_device != "cpu":
            free_gpus -= learners
        if free_gpus >= max(learners, 1):
            sites = sum(1 for node in nodes if node.gpu_slots)
            most = min(most, free_gpus)
    per_site = max(1, math.ceil(left / ((ACTORS_PER_INFERENCE * team + 1) * sites)))
    count = max(learners, min(sites * per_site, most))
    # Ranks that make no whole team had no role otherwise.
    extra = (left - count) % team
    return count + extra if count + extra <= most else count


def _least(role: Role, counts: Counts, demand: RoleDemand) -> int:
    """Fewest ranks of `role` that leave no rank without a partner."""
    if role == "learner":
        return 1
    if role == "inference":
        return max(1, counts.get("learner", 1))
    if role != demand.acting_role:
        return 0
    return 1 if demand.sharded else max(1, counts.get(demand.server_role, 1))


def _most(role: Role, counts: Counts, demand: RoleDemand) -> int | None:
    """Most ranks of `role` that the given ranks below them keep busy; None: no bound."""
    if role == "learner" and "inference" in demand.roles:
        return counts.get("inference")
    return counts.get(demand.acting_role) if role in ("learner", "inference") else None


def _absorb_rounding(
    counts: Counts, asked: Mapping[Role, Asked], world_size: int, demand: RoleDemand
) -> None:
    fractions = sum(1 for value in asked.values() if isinstance(value, float))
    excess = world_size - sum(demand.weight(role) * count for role, count in counts.items())
    team = demand.ranks_per_env
    # Each rounding is off by less than one rank; more than that is the user's to settle.
    rounding = isinstance(asked[demand.acting_role], float) and abs(excess) <= fractions * team
    if rounding and excess % team == 0:
        counts[demand.acting_role] += excess // team


def _check(
    counts: Counts,
    asked: Mapping[Role, Asked],
    world_size: int,
    demand: RoleDemand,
    overrides: Mapping[int, Role],
) -> None:
    equation = _equation(counts, asked)
    chain: list[Role] = [role for role in demand.roles if role not in ("follower", "evaluator")]
    if counts["learner"] < 1:
        raise TopologyError(f"{equation}: a run needs at least one learner")
    for server, client in pairwise(chain):
        if demand.sharded and counts[client] < 1:
            raise TopologyError(f"{equation}: a run needs at least one worker")
        if counts[client] < counts[server] and not demand.sharded:
            raise TopologyError(
                f"{equation}: each of the {_label(server)} ({counts[server]}) needs at least "
                f"one of the {_label(client)} ({counts[client]}) for itself"
            )
    for role in demand.roles:
        ranks = sorted(rank for rank, pinned in overrides.items() if pinned == role)
        if len(ranks) > counts[role]:
            raise TopologyError(
                f"{equation}: HPCRL_ROLE makes {len(ranks)} ranks {_label(role)} "
                f"({format_ranks(ranks)}), but there is room for {counts[role]}"
            )
    _check_teams(counts, equation, demand, overrides)
    total = sum(counts.values())
    if total > world_size:
        raise TopologyError(
            f"{equation} > world size {world_size}: found {world_size} ranks, need at least {total}"
        )
    if total < world_size:
        raise TopologyError(
            f"{equation} < world size {world_size}: ranks without a role: {world_size - total}; "
            + (
                f"they make no whole team of {demand.ranks_per_env}: start {total} or "
                f"{total + demand.ranks_per_env} ranks"
                if asked[demand.acting_role] == "auto"
                else f"start {total} ranks, or set topology.actors to auto"
            )
        )


def _check_teams(
    counts: Counts, equation: str, demand: RoleDemand, overrides: Mapping[int, Role]
) -> None:
    if demand.ranks_per_env == 1:
        return
    if counts.get("evaluator", 0):
        raise TopologyError(
            f"{equation}: an evaluator steps its environments alone, and env.ranks_per_env is "
            f"{demand.ranks_per_env}: set topology.evaluators to 0"
        )
    teams = ("follower", demand.acting_role)
    given = sorted(rank for rank, role in overrides.items() if role in teams)
    if given:
        raise TopologyError(
            f"HPCRL_ROLE gives ranks {format_ranks(given)} a place in a team of "
            f"{demand.ranks_per_env} (env.ranks_per_env): hpcrl forms the teams; unset it there"
        )


def _label(role: Role, config_key: bool = False) -> str:
    if role == "inference":
        return "inference" if config_key else "inference ranks"
    return "actors" if config_key and role == "worker" else f"{role}s"


def _equation(counts: Counts, asked: Mapping[Role, Asked]) -> str:
    names = {role: "inference" if role == "inference" else f"{role}s" for role in counts}
    left = " + ".join(f"{names[role]}({asked[role]})" for role in counts)
    right = " + ".join(str(count) for count in counts.values())
    return f"{left} = {right} = {sum(counts.values())}"
