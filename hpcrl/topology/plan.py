"""The pure function from what is asked and what exists to a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcrl.topology.assignment import assign_balanced
from hpcrl.topology.config import Role, RoleDemand, TopologyConfig, TopologyError
from hpcrl.topology.counts import resolve_counts
from hpcrl.topology.nodes import NodeInfo, canonical_nodes, format_ranks
from hpcrl.topology.notes import notes_of
from hpcrl.topology.placement import place_devices, place_roles
from hpcrl.topology.value import Topology


def plan_topology(
    config: TopologyConfig,
    nodes: Sequence[NodeInfo],
    demand: RoleDemand | None = None,
    overrides: Mapping[int, Role] | None = None,
) -> Topology:
    """Lay out the roles on the ranks of `nodes`; equal arguments give equal topologies.

    Args:
      config: the counts that the user asks for.
      nodes: every node with its ranks; together they hold the ranks 0 to world size - 1.
      demand: what the layout needs; central placement on any device when None.
      overrides: roles given for some ranks (HPCRL_ROLE), by world rank.

    Raises:
      TopologyError: when that is impossible; the message holds the whole equation.
    """
    demand = RoleDemand() if demand is None else demand
    nodes = canonical_nodes(nodes)
    overrides = _checked_overrides(overrides or {}, demand, sum(len(n.ranks) for n in nodes))
    counts = resolve_counts(config, demand, nodes, overrides)
    role_of, leader_of = place_roles(counts, demand, nodes, overrides, config.allow_gpu_sharing)
    device_of = place_devices(role_of, demand, nodes, config.allow_gpu_sharing)
    node_of = [0] * len(role_of)
    for order, node in enumerate(nodes):
        for rank in node.ranks:
            node_of[rank] = order
    topology = Topology(
        placement=demand.placement,
        nodes=nodes,
        role_of=role_of,
        node_of=tuple(node_of),
        device_of=device_of,
        parent_of=_parents(role_of, node_of, leader_of),
        sharded=demand.sharded,
    )
    return replace(topology, notes=notes_of(topology, demand))


def _checked_overrides(
    overrides: Mapping[int, Role], demand: RoleDemand, world_size: int
) -> dict[int, Role]:
    for rank, role in sorted(overrides.items()):
        if not 0 <= rank < world_size:
            raise TopologyError(
                f"a role is given for rank {rank}, but the last rank is {world_size - 1}"
            )
        if role not in demand.roles:
            ranks = format_ranks(sorted(r for r, given in overrides.items() if given == role))
            raise TopologyError(
                f"HPCRL_ROLE makes rank {ranks} {role}, but this layout has only the roles "
                f"{', '.join(demand.roles)}"
            )
    return dict(overrides)


def _parents(
    role_of: Sequence[Role], node_of: Sequence[int], leader_of: Mapping[int, int]
) -> tuple[int | None, ...]:
    ranks: dict[Role, list[int]] = {}
    for rank, role in enumerate(role_of):
        ranks.setdefault(role, []).append(rank)
    learners = ranks["learner"]
    parent_of: dict[int, int] = dict(leader_of)
    for role in ("inference", "worker", "evaluator"):
        parent_of.update(assign_balanced(ranks.get(role, []), learners, node_of))
    if "actor" in ranks:
        # Dealt learner by learner, so that the larger shares do not all fall to one cell.
        turn: dict[int, int] = {}
        seen = dict.fromkeys(learners, 0)
        for rank in ranks["inference"]:
            turn[rank] = seen[parent_of[rank]]
            seen[parent_of[rank]] += 1
        servers = sorted(turn, key=lambda rank: (turn[rank], parent_of[rank]))
        parent_of.update(assign_balanced(ranks["actor"], servers, node_of))
    return tuple(parent_of.get(rank) for rank in range(len(role_of)))
