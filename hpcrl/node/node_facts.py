"""What a rank knows of its node, and the threads that it may use there."""

from __future__ import annotations

import os
from typing import Any

from hpcrl.config.root import Config
from hpcrl.layouts import rules_of
from hpcrl.node.devices import detect_gpu_count, torch_backend, visible_gpus
from hpcrl.topology import Topology

NICENESS = {"learner": 0, "inference": 2, "actor": 5, "worker": 5, "follower": 5, "evaluator": 10}
"""Where ranks outnumber cores: the later in the data flow, the earlier a rank gets the core, as
back-pressure slows down what comes before it anyway. Raising it needs no privilege."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def node_facts(role: str | None) -> dict[str, Any]:
    """Return host, visible GPUs, usable cores and role override of this process."""
    backend = torch_backend()
    gpus = visible_gpus(os.environ, detect_gpu_count(backend), backend)
    return {
        "host": os.uname().nodename,
        "gpus": [gpu.name for gpu in gpus],
        "cores": sorted(os.sched_getaffinity(0)),
        "role": role,
    }


def choose_threads(config: Config, topology: Topology, rank: int) -> int:
    """Set this process's thread counts, before torch is imported; return them.

    Variables inherited from the submitting shell are overruled: they are the same for all
    roles, and an actor needs one thread where a learner wants many.
    """
    role, node = topology.role_of[rank], topology.nodes[topology.node_of[rank]]
    threads = min(_threads_of(config, topology, rank), len(os.sched_getaffinity(0)))
    if threads_beside(config, topology, rank) > node.num_cores > 0:
        os.nice(NICENESS[role])
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ["HPCRL_THREADS"] = str(min(threads, max(node.num_cores, 1)))
    return threads


def threads_beside(config: Config, topology: Topology, rank: int) -> int:
    """Return how many threads want the cores of `rank`'s node.

    These are its ranks', and the children that step isolated environments: one for each group of
    an acting rank, one for an evaluator.
    """
    ranks = topology.nodes[topology.node_of[rank]].ranks
    threads = sum(_threads_of(config, topology, r) for r in ranks)
    if config.env.isolation == "none":
        return threads
    children = {"actor": config.env.groups, "worker": config.env.groups, "evaluator": 1}
    return threads + sum(children.get(topology.role_of[r], 0) for r in ranks)


def _threads_of(config: Config, topology: Topology, rank: int) -> int:
    """As many as were configured; else a share of the cores that no single-threaded rank needs.

    A learner on a CPU for whose weights all acting waits shares the whole node with other
    learners only; dense networks are too small to gain by that.
    """
    role, node = topology.role_of[rank], topology.nodes[topology.node_of[rank]]
    if role not in ("learner", "inference"):
        return 1
    configured = config.learner.threads if role == "learner" else config.inference.threads
    if configured:
        return configured
    on_gpu = topology.device_of[rank] is not None
    heavy = config.network.torso != "mlp"
    alone = role == "learner" and heavy and not on_gpu and rules_of(config).synchronous
    roles = ("learner",) if alone else ("learner", "inference")
    wanting = [r for r in node.ranks if topology.role_of[r] in roles]
    spare = node.num_cores - (0 if alone else len(node.ranks) - len(wanting))
    return max(1, spare // len(wanting))
