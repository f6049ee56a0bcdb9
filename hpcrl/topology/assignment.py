"""Which server each client talks to: balanced to within one, on its own node where possible."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence


def assign_balanced(
    clients: Sequence[int], servers: Sequence[int], node_of: Sequence[int]
) -> dict[int, int]:
    """Map each client rank to a server rank.

    Every server gets floor(C/S) or ceil(C/S) of the C clients. Within that, as many clients
    as possible stay on their own node: a node's servers hold floor(C/S) each, and the C mod
    S larger shares go first to the nodes whose clients would otherwise have to leave. Each
    share granted to such a node keeps exactly one client at home, so no other choice of
    larger shares keeps more.

    Args:
      clients: ranks to be assigned, in the order in which servers are filled.
      servers: ranks that serve; of equals, the first get the larger share.
      node_of: node index of every world rank.

    Returns:
      server rank by client rank.

    Raises:
      ValueError: when there are clients but no servers.
    """
    if not servers:
        if clients:
            raise ValueError(f"{len(clients)} clients, but no server to assign them to")
        return {}
    at_home: dict[int, deque[int]] = {}
    for client in clients:
        at_home.setdefault(node_of[client], deque()).append(client)
    room = _shares(servers, node_of, len(clients), {n: len(c) for n, c in at_home.items()})

    server_of: dict[int, int] = {}
    for server in servers:
        local = at_home.get(node_of[server], deque())
        while local and room[server]:
            server_of[local.popleft()] = server
            room[server] -= 1
    seats = (server for server in servers for _ in range(room[server]))
    away = (client for client in clients if client not in server_of)
    server_of.update(zip(away, seats, strict=True))
    return server_of


def _shares(
    servers: Sequence[int], node_of: Sequence[int], num_clients: int, clients_on: dict[int, int]
) -> dict[int, int]:
    """Return how many clients each server gets; `clients_on` counts them by node."""
    base, num_larger = divmod(num_clients, len(servers))
    servers_on = Counter(node_of[server] for server in servers)
    leaving = {n: clients_on.get(n, 0) - base * k for n, k in servers_on.items()}
    share = dict.fromkeys(servers, base)
    for server in servers:
        node = node_of[server]
        if num_larger and leaving[node] > 0:
            share[server] += 1
            leaving[node] -= 1
            num_larger -= 1
    for server in servers:
        if num_larger and share[server] == base:
            share[server] += 1
            num_larger -= 1
    return share
