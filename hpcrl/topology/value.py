"""The topology as a frozen value: who plays which role where, and who talks to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcrl.topology.config import Placement, Role
from hpcrl.topology.nodes import NodeInfo
from hpcrl.topology.table import format_table


@dataclass(frozen=True)
class Topology:
    """Roles, devices and links of all ranks; the same on every rank of a job.

    A cell is a learner with everything that feeds it. The sequences are indexed by world
    rank; the mappings are keyed by world rank, and their rank lists ascend.

    Attributes:
      placement: "central" (actors and inference ranks) or "local" (workers).
      nodes: the nodes, by their lowest rank.
      role_of: role of each rank.
      node_of: index into `nodes` of each rank's node.
      device_of: GPU of each rank, numbered within its node; None for the CPU.
      parent_of: the rank that serves each rank: follower to the actor or worker that leads it;
        actor to inference rank; inference rank, worker and evaluator to learner; None for
        learners.
      sharded: whether each learner holds a shard of the parameters; then each worker talks to
        all learners, and the cells say only who starts and leaves with whom.
      notes: what the user should know about this layout, one sentence each.
    """

    placement: Placement
    nodes: tuple[NodeInfo, ...]
    role_of: tuple[Role, ...]
    node_of: tuple[int, ...]
    device_of: tuple[int | None, ...]
    parent_of: tuple[int | None, ...]
    sharded: bool = False
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.role_of)

    @cached_property
    def learner_ranks(self) -> tuple[int, ...]:
        """World ranks of the learners; the position in it is the learner's index."""
        return self.ranks_of("learner")

    @property
    def root_learner(self) -> int:
        """World rank of learner 0, which writes the run directory; rank 0 where possible."""
        return self.learner_ranks[0]

    @cached_property
    def inference_of(self) -> Mapping[int, int]:
        """Inference rank of each actor."""
        return self._parents(("actor",))

    @cached_property
    def learner_of(self) -> Mapping[int, int]:
        """Learner of each inference rank, worker and evaluator."""
        return self._parents(("inference", "worker", "evaluator"))

    @cached_property
    def actors_of(self) -> Mapping[int, tuple[int, ...]]:
        """Actors of each inference rank."""
        return self._children("inference", ("actor",))

    @cached_property
    def clients_of(self) -> Mapping[int, tuple[int, ...]]:
        """Ranks that send each learner its unrolls: inference ranks or workers."""
        return self._children("learner", ("inference", "worker"))

    @cached_property
    def evaluators_of(self) -> Mapping[int, tuple[int, ...]]:
        """Evaluators of each learner."""
        return self._children("learner", ("evaluator",))

    @cached_property
    def team_of(self) -> Mapping[int, tuple[int, ...]]:
        """Ranks that step environments together, by each of them; its leader first."""
        followers: dict[int, list[int]] = {}
        for rank, leader in self._parents(("follower",)).items():
            followers.setdefault(leader, []).append(rank)
        teams = [(leader, *ranks) for leader, ranks in followers.items()]
        return {rank: team for team in teams for rank in team}

    def leader_of(self, rank: int) -> int:
        """Return the leader of the rank's team, or the rank itself if it has none."""
        return self.team_of.get(rank, (rank,))[0]

    @cached_property
    def index_of_role(self) -> tuple[int, ...]:
        """Index of each rank among the ranks of its role, ascending; seeds derive from it."""
        seen: Counter[Role] = Counter()
        index = []
        for role in self.role_of:
            index.append(seen[role])
            seen[role] += 1
        return tuple(index)

    @cached_property
    def cell_of(self) -> tuple[int, ...]:
        """Learner index of the cell that each rank belongs to."""
        return tuple(self.index_of_role[self._root(rank)] for rank in range(self.world_size))

    def ranks_of(self, role: Role) -> tuple[int, ...]:
        """Return the world ranks of `role`, ascending."""
        return tuple(rank for rank, played in enumerate(self.role_of) if played == role)

    def neighbours_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank exchanges messages with, but for learners among each other.

        They are its parent and its children; where parameters are sharded, workers have all
        learners.
        """
        tree = {self.parent_of[rank]} - {None}
        tree |= {other for other, parent in enumerate(self.parent_of) if parent == rank}
        mesh = {"worker": self.learner_ranks, "learner": self.ranks_of("worker")}
        if self.sharded:
            tree |= set(mesh.get(self.role_of[rank], ()))
        return tuple(sorted(other for other in tree if other is not None))

    def host_of(self, rank: int) -> str:
        """Return the name of the rank's node."""
        return self.nodes[self.node_of[rank]].host

    def table(self) -> str:
        """Return the whole topology as a plain text table with a summary and the notes."""
        return format_table(self)

    def to_json(self) -> dict[str, Any]:
        """Return what topology.json holds: a JSON-able dict with one entry per rank."""
        return {
            "world_size": self.world_size,
            "placement": self.placement,
            "sharded": self.sharded,
            "nodes": [
                {"host": n.host, "num_gpus": n.num_gpus, "num_cores": n.num_cores}
                for n in self.nodes
            ],
            "ranks": [
                {
                    "rank": rank,
                    "host": self.host_of(rank),
                    "role": self.role_of[rank],
                    "index": self.index_of_role[rank],
                    "cell": self.cell_of[rank],
                    "gpu": self.device_of[rank],
                    "served_by": self.parent_of[rank],
                }
                for rank in range(self.world_size)
            ],
            "notes": list(self.notes),
        }

    def _root(self, rank: int) -> int:
        parent = self.parent_of[rank]
        return rank if parent is None else self._root(parent)

    def _parents(self, roles: tuple[Role, ...]) -> dict[int, int]:
        return {
            rank: parent
            for rank, parent in enumerate(self.parent_of)
            if parent is not None and self.role_of[rank] in roles
        }

    def _children(self, server: Role, clients: tuple[Role, ...]) -> dict[int, tuple[int, ...]]:
        lists: dict[int, list[int]] = {rank: [] for rank in self.ranks_of(server)}
        for rank, parent in self._parents(clients).items():
            lists[parent].append(rank)
        return {rank: tuple(ranks) for rank, ranks in lists.items()}
