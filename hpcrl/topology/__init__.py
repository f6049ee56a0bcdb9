"""Which rank plays which role on which node and GPU, and who talks to whom.

A pure function of the asked counts and the node map, without MPI: `plan_topology`.
"""

from hpcrl.topology.config import (
    ROLES,
    DeviceNeed,
    Placement,
    Role,
    RoleDemand,
    TopologyConfig,
    TopologyError,
)
from hpcrl.topology.counts import local_world_size
from hpcrl.topology.nodes import NodeInfo, format_ranks, node_map, uniform_node_map
from hpcrl.topology.plan import plan_topology
from hpcrl.topology.table import TABLE_HEADER, summary_lines, table_rows
from hpcrl.topology.value import Topology

__all__ = [
    "ROLES",
    "TABLE_HEADER",
    "DeviceNeed",
    "NodeInfo",
    "Placement",
    "Role",
    "RoleDemand",
    "Topology",
    "TopologyConfig",
    "TopologyError",
    "format_ranks",
    "local_world_size",
    "node_map",
    "plan_topology",
    "summary_lines",
    "table_rows",
    "uniform_node_map",
]
