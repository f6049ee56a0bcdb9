"""Which ranks live on which node, and what the node has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.topology.config import TopologyError


@dataclass(frozen=True)
class NodeInfo:
    """One node of the job.

    Attributes:
      host: its name, unique in the job.
      ranks: the world ranks on it, in any order; they need not be contiguous.
      num_gpus: GPUs that every rank on the node can see.
      num_cores: CPU cores that the job may use on it; 0 when unknown.
    """

    host: str
    ranks: tuple[int, ...]
    num_gpus: int = 0
    num_cores: int = 0

    @property
    def gpu_slots(self) -> int:
        """GPUs that a rank of its own can use."""
        return min(self.num_gpus, len(self.ranks))


def canonical_nodes(nodes: Sequence[NodeInfo]) -> tuple[NodeInfo, ...]:
    """Return the nodes by their lowest rank, ranks ascending, nodes without ranks left out.

    Raises:
      TopologyError: unless the nodes hold the ranks 0 to world size - 1, each once, and
        have distinct names.
    """
    held = [node for node in nodes if node.ranks]
    ranks = sorted(rank for node in held for rank in node.ranks)
    if not ranks:
        raise TopologyError("the node map holds no ranks")
    if ranks != list(range(len(ranks))):
        raise TopologyError(
            f"the node map must hold each rank from 0 to {len(ranks) - 1} once; "
            f"it holds {format_ranks(ranks)}"
        )
    if len({node.host for node in held}) < len(held):
        raise TopologyError("the node map names a host twice: give each host one entry")
    ordered = (
        NodeInfo(node.host, tuple(sorted(node.ranks)), max(node.num_gpus, 0), node.num_cores)
        for node in held
    )
    return tuple(sorted(ordered, key=lambda node: node.ranks[0]))


def uniform_node_map(
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int = 0,
    cores_per_node: int = 0,
    distribution: Literal["block", "cyclic"] = "block",
) -> tuple[NodeInfo, ...]:
    """Return the map of equal nodes, as `hpcrl plan` needs it.

    Args:
      nodes: number of nodes.
      ranks_per_node: ranks on each.
      gpus_per_node: GPUs of each.
      cores_per_node: cores of each; 0 when unknown.
      distribution: "block" fills a node before the next, "cyclic" deals ranks round-robin.

    Raises:
      TopologyError: when `nodes` or `ranks_per_node` is below 1.
    """
    if nodes < 1 or ranks_per_node < 1:
        raise TopologyError(f"{nodes} nodes of {ranks_per_node} ranks: both must be at least 1")
    size = nodes * ranks_per_node
    by_node = [
        range(n * ranks_per_node, (n + 1) * ranks_per_node)
        if distribution == "block"
        else range(n, size, nodes)
        for n in range(nodes)
    ]
    width = len(str(nodes - 1))
    return tuple(
        NodeInfo(f"node{n:0{width}d}", tuple(ranks), gpus_per_node, cores_per_node)
        for n, ranks in enumerate(by_node)
    )


def node_map(
    hosts: Sequence[str], gpus: Sequence[Sequence[str]], cores: Sequence[Collection[int]]
) -> tuple[NodeInfo, ...]:
    """Build the map from what each rank reported, all arguments indexed by rank.

    Args:
      hosts: name of the rank's node.
      gpus: names of the GPUs that the rank sees, in its own order (`devices.visible_gpus`).
      cores: the CPU cores that the rank may use; those of a node's ranks are the job's.

    Raises:
      TopologyError: when ranks of one node see different GPUs. The roles are planned for
        nodes, so that every rank of a node must be able to use any of its GPUs; masks per
        task also break GPU peer-to-peer copies.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    nodes = []
    for host, ranks in by_host.items():
        first, seen = ranks[0], tuple(gpus[ranks[0]])
        for rank in ranks:
            if tuple(gpus[rank]) != seen:
                raise TopologyError(
                    f"node {host}: rank {first} sees the GPUs {list(seen)} but rank {rank} sees "
                    f"{list(gpus[rank])}; request GPUs per node (--gpus-per-node), not per task, "
                    "or add --gpu-bind=none, and leave the choice to hpcrl"
                )
        num_cores = len(set().union(*(cores[rank] for rank in ranks)))
        nodes.append(NodeInfo(host, tuple(ranks), len(seen), num_cores))
    return tuple(nodes)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ascending `ranks` in Slurm's list notation, such as "0-3,8,10-30:4"."""
    parts = []
    start = 0
    while start < len(ranks):
        stop = start + 1
        step = ranks[stop] - ranks[start] if stop < len(ranks) else 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        if stop - start < 3 and step != 1:
            stop = start + 1
        first, last = ranks[start], ranks[stop - 1]
        if first == last:
            parts.append(str(first))
        else:
            parts.append(f"{first}-{last}" + (f":{step}" if step != 1 else ""))
        start = stop
    return ",".join(parts)
