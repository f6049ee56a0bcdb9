"""Seats of a job without its start-up: what ranks of a benchmark need to run a role's own code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpcrl.acting.env_batches import make_one
from hpcrl.brain import Brain
from hpcrl.comm.commands import CommandSender
from hpcrl.comm.link import wait_until
from hpcrl.comm.startup import gather_json
from hpcrl.comm.transport import MpiLink
from hpcrl.comm.weights import WeightsPublisher
from hpcrl.comm.wire import Command
from hpcrl.config.load import parse_config
from hpcrl.job import Job
from hpcrl.node.node_facts import choose_threads, node_facts, threads_beside
from hpcrl.node.torch_device import keep_freed_memory
from hpcrl.specs import EnvSpec
from hpcrl.start.demand import demand_of
from hpcrl.timing import choose_wait_policy
from hpcrl.topology import node_map, plan_topology


def take_seat(data: Mapping[str, Any], run_dir: str) -> tuple[Job, Brain]:
    """Collective: build this rank's job from a configuration's data, the same on all ranks."""
    config = parse_config(dict(data))
    link = MpiLink(deadline_s=120.0, max_message_bytes=config.transport.max_message_bytes)
    world = link.group(range(link.size))
    if world is None:
        raise RuntimeError("every rank belongs to the world")
    facts = gather_json(world, node_facts(None))
    nodes = node_map(
        [f["host"] for f in facts], [f["gpus"] for f in facts], [f["cores"] for f in facts]
    )
    topology = plan_topology(config.topology, nodes, demand_of(config))
    node = topology.nodes[topology.node_of[link.rank]]
    link.label = f"{topology.role_of[link.rank]} {topology.index_of_role[link.rank]}"
    threads = threads_beside(config, topology, link.rank)
    link.wait_policy = choose_wait_policy(config.transport.wait, threads, node.num_cores)
    torch.set_num_threads(choose_threads(config, topology, link.rank))
    keep_freed_memory()
    batch = make_one(config.env)
    batch.close()
    env = EnvSpec.from_json(batch.spec)
    brain = Brain(config, env)
    size = brain.make_network(0).state_size
    items = brain.window.items_per_unroll if brain.window else 0
    job = Job(config, topology, link, world, Path(run_dir), 0, env, brain.behaviour, size, items)
    return job, brain


def stop_clients(
    commands: CommandSender, publisher: WeightsPublisher, job: Job, drain: Any
) -> None:
    """End a learner's clients as the learner role does; `drain` empties its queue once."""
    commands.send(Command.STOP)
    commands.await_done(drain)
    waiter = job.link.waiter(lambda: f"{job.link.label} waited for its last weights to leave")
    wait_until(publisher.idle, waiter)
    commands.send(Command.EXIT)
