"""The topology as rows of text: one per group of ranks that do the same in the same place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcrl.topology.config import ROLES
from hpcrl.topology.nodes import format_ranks

if TYPE_CHECKING:
    from hpcrl.topology.value import Topology

TABLE_HEADER = ("host", "ranks", "role", "index", "cell", "served by", "device")


def table_rows(topology: Topology) -> list[tuple[str, ...]]:
    """Return the rows under `TABLE_HEADER`, by node, then role, then rank.

    Ranks of one node with the same role, server and device share a row, so that the table
    of a large job stays readable; every rank is in exactly one row.
    """
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, role in enumerate(topology.role_of):
        parent, device = topology.parent_of[rank], topology.device_of[rank]
        key = (
            topology.node_of[rank],
            ROLES.index(role),
            -1 if parent is None else parent,
            -1 if device is None else device,
        )
        groups.setdefault(key, []).append(rank)
    rows: list[tuple[str, ...]] = []
    for (node, role_order, parent, device), ranks in sorted(groups.items()):
        indices = [topology.index_of_role[rank] for rank in ranks]
        away = parent >= 0 and topology.node_of[parent] != node
        rows.append(
            (
                topology.nodes[node].host,
                format_ranks(ranks),
                ROLES[role_order],
                format_ranks(indices),
                str(topology.cell_of[ranks[0]]),
                _served_by(topology, role_order, parent, away),
                "cpu" if device < 0 else f"gpu {device}",
            )
        )
    return rows


def _served_by(topology: Topology, role_order: int, parent: int, away: bool) -> str:
    if parent < 0:
        return "-"
    if topology.sharded and ROLES[role_order] == "worker":
        return format_ranks(topology.learner_ranks)
    return f"{parent}{' (other node)' if away else ''}"


def summary_lines(topology: Topology) -> list[str]:
    """Return the totals: ranks per role, load per server, links between nodes, GPUs."""
    totals = [
        _plural(len(ranks), "inference rank" if role == "inference" else role)
        for role in ROLES
        if (ranks := topology.ranks_of(role))
    ]
    if topology.placement == "central":
        served, what = topology.actors_of, "actors per inference rank"
    elif topology.sharded:
        workers = topology.ranks_of("worker")
        served, what = dict.fromkeys(topology.learner_ranks, workers), "workers of every learner"
    else:
        served, what = topology.clients_of, "workers per learner"
    loads = [len(ranks) for ranks in served.values()]
    between = sum(
        topology.node_of[other] != topology.node_of[rank]
        for rank in range(topology.world_size)
        for other in topology.neighbours_of(rank)
        if other < rank
    )
    used = {
        (topology.node_of[rank], device)
        for rank, device in enumerate(topology.device_of)
        if device is not None
    }
    gpus = sum(node.num_gpus for node in topology.nodes)
    return [
        f"{_plural(topology.world_size, 'rank')} on {_plural(len(topology.nodes), 'node')}: "
        f"{', '.join(totals)}",
        f"{what}: {_span(loads)}; links between nodes: {between}; GPUs used: {len(used)} of {gpus}",
    ]


def format_table(topology: Topology) -> str:
    """Return the table, the summary and the notes as aligned plain text."""
    rows = [TABLE_HEADER, *table_rows(topology)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(TABLE_HEADER))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"note: {note}" for note in topology.notes]
    return "\n".join(line.rstrip() for line in [*lines, "", *summary_lines(topology), *notes])


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
