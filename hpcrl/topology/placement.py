"""Which rank plays which role, and which GPU of its node it uses."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from hpcrl.topology.config import Role, RoleDemand, TopologyError
from hpcrl.topology.nodes import NodeInfo


class _NodeState:
    """What is still free on a node while roles are handed out."""

    def __init__(self, order: int, node: NodeInfo, overrides: Mapping[int, Role]) -> None:
        self.order = order
        self.node = node
        self.free = [rank for rank in node.ranks if rank not in overrides]
        self.placed = Counter(overrides[rank] for rank in node.ranks if rank in overrides)
        self.gpu_users = 0

    def gpu_tier(self, wants_gpu: bool, allow_sharing: bool) -> int:
        """Return 0 for the best nodes for a role: a free GPU, then a shared one, then none."""
        if not wants_gpu or self.gpu_users < self.node.num_gpus:
            return 0
        return 1 if allow_sharing and self.node.num_gpus else 2


class _Placer:
    def __init__(
        self,
        demand: RoleDemand,
        nodes: Sequence[NodeInfo],
        overrides: Mapping[int, Role],
        allow_sharing: bool,
    ) -> None:
        self._demand = demand
        self._allow_sharing = allow_sharing
        self._states = [_NodeState(i, node, overrides) for i, node in enumerate(nodes)]
        self.role_of: dict[int, Role] = dict(overrides)
        for state in self._states:
            for role, count in state.placed.items():
                state.gpu_users += count if self._wants_gpu(role) else 0

    def _wants_gpu(self, role: Role) -> bool:
        return self._demand.device_need(role) != "cpu"

    def tier(self, state: _NodeState, role: Role) -> int:
        return state.gpu_tier(self._wants_gpu(role), self._allow_sharing)

    def open_states(self) -> list[_NodeState]:
        return [state for state in self._states if state.free]

    def missing(self, role: Role, count: int) -> int:
        return count - sum(state.placed[role] for state in self._states)

    def put(self, state: _NodeState, role: Role, position: int = 0) -> None:
        self.role_of[state.free.pop(position)] = role
        state.placed[role] += 1
        state.gpu_users += self._wants_gpu(role)

    def put_root_learner(self, count: int) -> None:
        """Make rank 0 a learner, unless that would cost the root learner its GPU."""
        home = self._states[0]
        if 0 in self.role_of or self.missing("learner", count) < 1:
            return
        best = min(self.tier(state, "learner") for state in self.open_states())
        if self.tier(home, "learner") == best:
            self.put(home, "learner")

    def put_beside_learners(self, count: int) -> None:
        """Give each learner an inference rank on its own node, where GPUs allow it."""
        left = self.missing("inference", count)
        tiers = Counter(self.tier(state, "inference") for state in self.open_states())
        for state in self._states:
            wanted = state.placed["learner"] - state.placed["inference"]
            for _ in range(min(wanted, len(state.free), left)):
                tier = self.tier(state, "inference")
                if tier > min(+tiers):
                    break
                self.put(state, "inference")
                left -= 1
                tiers[tier] -= 1
                if state.free:
                    tiers[self.tier(state, "inference")] += 1

    def spread(self, role: Role, count: int) -> None:
        """Place `role` in proportion to the ranks that nodes still have, best GPU tier first.

        Proportion by the Sainte-Laguë method: each rank goes to the node with the highest
        free ranks / (2 seats + 1).
        """
        weight = {s.order: len(s.free) + s.placed[role] for s in self._states}

        def key(state: _NodeState) -> tuple[int, float, int]:
            share = weight[state.order] / (2 * state.placed[role] + 1)
            return (self.tier(state, role), -share, state.order)

        heap = [key(state) for state in self.open_states()]
        heapq.heapify(heap)
        for _ in range(self.missing(role, count)):
            state = self._states[heap[0][2]]
            self.put(state, role)
            if state.free:
                heapq.heapreplace(heap, key(state))
            else:
                heapq.heappop(heap)

    def put_evaluators(self, count: int) -> None:
        """Take evaluators from the nodes that have the most acting ranks per server."""
        server = self._demand.server_role
        for _ in range(self.missing("evaluator", count)):
            state = max(
                self.open_states(),
                key=lambda s: (len(s.free) / (s.placed[server] + 0.5), -s.order),
            )
            self.put(state, "evaluator", position=-1)

    def put_rest(self, role: Role) -> None:
        for state in self._states:
            while state.free:
                self.put(state, role, position=-1)

    def put_teams(self, leader: Role, size: int) -> dict[int, int]:
        """Form teams of `size` adjacent ranks; return the leader of each follower.

        What a node has left over after whole teams is joined over nodes.
        """
        rest: list[tuple[_NodeState, int]] = []
        leader_of: dict[int, int] = {}
        for state in self._states:
            whole = len(state.free) // size * size
            rest += [(state, rank) for rank in state.free[whole:]]
            self._put_team_ranks([(state, r) for r in state.free[:whole]], leader, size, leader_of)
        self._put_team_ranks(rest, leader, size, leader_of)
        return leader_of

    def _put_team_ranks(
        self,
        ranks: Sequence[tuple[_NodeState, int]],
        leader: Role,
        size: int,
        leader_of: dict[int, int],
    ) -> None:
        for position, (state, rank) in enumerate(ranks):
            first = ranks[position - position % size][1]
            if rank != first:
                leader_of[rank] = first
            self.put(state, leader if rank == first else "follower", state.free.index(rank))


def place_roles(
    counts: Mapping[Role, int],
    demand: RoleDemand,
    nodes: Sequence[NodeInfo],
    overrides: Mapping[int, Role],
    allow_sharing: bool,
) -> tuple[tuple[Role, ...], dict[int, int]]:
    """Return the role of each rank, and the leader of each follower.

    GPU roles go to nodes with GPUs first, one per GPU. Among equal nodes, roles are spread
    in proportion to ranks, so that actors find an inference rank at home. Within a node
    learners take the lowest ranks, then inference ranks, then acting ranks, then evaluators.

    Args:
      counts: ranks per role, adding up to the world size (`resolve_counts`).
      demand: what the layout needs.
      nodes: the canonical node map.
      overrides: roles that are given for some ranks; these stay.
      allow_sharing: whether a GPU may have several ranks.
    """
    placer = _Placer(demand, nodes, overrides, allow_sharing)
    placer.put_root_learner(counts["learner"])
    placer.spread("learner", counts["learner"])
    if demand.placement == "central":
        placer.put_beside_learners(counts["inference"])
        placer.spread("inference", counts["inference"])
    placer.put_evaluators(counts.get("evaluator", 0))
    leader_of: dict[int, int] = {}
    if demand.ranks_per_env > 1:
        leader_of = placer.put_teams(demand.acting_role, demand.ranks_per_env)
    placer.put_rest(demand.acting_role)
    return tuple(placer.role_of[rank] for rank in range(len(placer.role_of))), leader_of


def place_devices(
    role_of: Sequence[Role], demand: RoleDemand, nodes: Sequence[NodeInfo], allow_sharing: bool
) -> tuple[int | None, ...]:
    """Return each rank's GPU, numbered within its node, or None for the CPU.

    Learners choose first, then inference ranks, by rank; the number is the order among the
    GPU users of the node and never a function of the world rank.

    Raises:
      TopologyError: when a role that must have a GPU finds none.
    """
    device_of: list[int | None] = [None] * len(role_of)
    for node in nodes:
        users = [
            rank
            for role in ("learner", "inference")
            if demand.device_need(role) != "cpu"
            for rank in node.ranks
            if role_of[rank] == role
        ]
        for i, rank in enumerate(users):
            if i < node.num_gpus:
                device_of[rank] = i
            elif allow_sharing and node.num_gpus:
                device_of[rank] = i % node.num_gpus
            elif demand.device_need(role_of[rank]) == "gpu":
                raise TopologyError(
                    f"rank {rank} ({role_of[rank]}) must have a GPU, but node {node.host} has "
                    f"{node.num_gpus} for {len(users)} ranks that want one; "
                    + (
                        "ask for fewer such ranks, or set topology.allow_gpu_sharing"
                        if node.num_gpus
                        else "allocate nodes with GPUs, or set the device to auto or cpu"
                    )
                )
    return tuple(device_of)
