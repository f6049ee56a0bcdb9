"""What is true of every topology, checked without its own methods where that is possible."""

import random
from collections import Counter

from hpcrl.topology import NodeInfo

MAPS = ("block", "cyclic", "random")


def spread_nodes(world_size, num_nodes, kind, gpus):
    """Nodes of as equal size as possible; `gpus` each, or per node when a sequence."""
    if kind == "block":
        home = [rank * num_nodes // world_size for rank in range(world_size)]
    elif kind == "cyclic":
        home = [rank % num_nodes for rank in range(world_size)]
    else:
        shuffled = random.Random(world_size * 31 + num_nodes)
        home = [shuffled.randrange(num_nodes) for _ in range(world_size)]
    each = [gpus] * num_nodes if isinstance(gpus, int) else gpus
    return tuple(
        NodeInfo(f"n{i}", tuple(r for r in range(world_size) if home[r] == i), each[i])
        for i in range(num_nodes)
    )


def parse_ranks(text):
    """The inverse of `format_ranks`, written independently of it."""
    ranks: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return ranks


def check_links(topology):
    """Every actor has one inference rank, each of those one learner, loads balanced to one."""
    roles = topology.role_of
    parents = {
        "actor": "inference",
        "inference": "learner",
        "worker": "learner",
        "evaluator": "learner",
    }
    for rank, role in enumerate(roles):
        if role == "follower":
            assert roles[topology.parent_of[rank]] in ("actor", "worker")
        elif role == "learner":
            assert topology.parent_of[rank] is None
        else:
            assert roles[topology.parent_of[rank]] == parents[role]
    for client, server in parents.items():
        servers = [rank for rank, role in enumerate(roles) if role == server]
        load = Counter({rank: 0 for rank in servers})
        load.update(topology.parent_of[r] for r, role in enumerate(roles) if role == client)
        if client in roles:
            assert max(load.values()) - min(load.values()) <= 1, (client, load)


def check_reachable(topology):
    """Walking down from the learners by the published mappings meets every rank once."""
    met = []
    for learner in topology.learner_ranks:
        met.append(learner)
        met += topology.evaluators_of[learner]
        for client in topology.clients_of[learner]:
            for rank in (client, *topology.actors_of.get(client, ())):
                met += topology.team_of.get(rank, (rank,))
    assert sorted(met) == list(range(topology.world_size))


def check_gpus(topology, allow_sharing=False):
    used: Counter[tuple[int, int]] = Counter()
    for rank, device in enumerate(topology.device_of):
        if device is None:
            continue
        assert topology.role_of[rank] in ("learner", "inference")
        assert 0 <= device < topology.nodes[topology.node_of[rank]].num_gpus
        used[topology.node_of[rank], device] += 1
    assert allow_sharing or all(count == 1 for count in used.values())


def check_topology(topology, **counts):
    check_links(topology)
    check_reachable(topology)
    check_gpus(topology)
    for role, count in counts.items():
        assert topology.role_of.count(role) == count


def role_counts(topology):
    names = ("learner", "inference", "actor", "worker", "evaluator")
    return tuple(topology.role_of.count(name) for name in names)
