"""What a user should know about a topology that is allowed but may not be meant."""

from __future__ import annotations

from collections import Counter

from hpcrl.topology.config import RoleDemand
from hpcrl.topology.value import Topology

UNEVEN_CELLS = 1.25
"""Ratio of acting ranks between the fullest and the emptiest cell that is worth a note."""


def notes_of(topology: Topology, demand: RoleDemand) -> tuple[str, ...]:
    """Return one sentence for each surprise that the layout holds."""
    return (
        *_gpu_notes(topology, demand),
        *_cell_notes(topology, demand),
        *_team_notes(topology),
    )


def _team_notes(topology: Topology) -> list[str]:
    teams = set(topology.team_of.values())
    split = [team for team in teams if len({topology.node_of[rank] for rank in team}) > 1]
    if not split:
        return []
    return [
        f"{len(split)} of {len(teams)} teams have ranks on several nodes; acting ranks per node "
        "that are a multiple of env.ranks_per_env avoid this"
    ]


def _gpu_notes(topology: Topology, demand: RoleDemand) -> list[str]:
    num_gpus = sum(node.num_gpus for node in topology.nodes)
    if not num_gpus:
        return []
    notes = []
    used = {
        (topology.node_of[rank], device)
        for rank, device in enumerate(topology.device_of)
        if device is not None
    }
    without = [
        rank
        for rank, role in enumerate(topology.role_of)
        if demand.device_need(role) != "cpu" and topology.device_of[rank] is None
    ]
    if without:
        first = without[0]
        notes.append(
            f"{len(without)} of the learner and inference ranks use the CPU because no GPU was "
            f"left for them (the first is rank {first}, {topology.role_of[first]}); "
            "topology.allow_gpu_sharing lets them share one"
        )
    if topology.sharded:
        notes.append(f"{num_gpus} GPUs are unused: in this layout workers and learners use the CPU")
    elif len(used) < num_gpus:
        notes.append(
            f"{num_gpus - len(used)} of {num_gpus} GPUs are unused; more learners or inference "
            "ranks would use them"
        )
    learners = topology.learner_ranks
    on_cpu = [rank for rank in learners if topology.device_of[rank] is None]
    if 0 < len(on_cpu) < len(learners):
        notes.append(
            f"{len(on_cpu)} of {len(learners)} learners use the CPU: the others wait for them at "
            "every gradient step"
        )
    return notes


def _cell_notes(topology: Topology, demand: RoleDemand) -> list[str]:
    notes = []
    if topology.root_learner != 0:
        notes.append(
            f"the root learner is rank {topology.root_learner}, not rank 0; it writes the run "
            "directory"
        )
    if topology.sharded:
        return notes
    acting = Counter(topology.cell_of[rank] for rank in topology.ranks_of(demand.acting_role))
    fewest, most = min(acting.values()), max(acting.values())
    if most > UNEVEN_CELLS * fewest:
        notes.append(
            f"learners are fed by {fewest} to {most} {demand.acting_role}s: the others wait for "
            "the slowest at every gradient step; counts that divide evenly avoid this"
        )
    return notes
