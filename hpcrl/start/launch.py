"""One rank of a training job, from the first collective to the exit code that all share."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl import exit_codes
from hpcrl.code_version import code_version
from hpcrl.comm.link import Group, Link
from hpcrl.comm.startup import (
    Failure,
    StartError,
    agree_to_start,
    broadcast_json,
    gather_json,
)
from hpcrl.comm.team import Team
from hpcrl.config.load import ConfigError, config_hash, parse_config, to_dict, to_yaml
from hpcrl.config.root import Config
from hpcrl.job import Seat
from hpcrl.layouts import (
    rules_of,
    waits_for_weights,
)
from hpcrl.node.node_facts import choose_threads, node_facts, threads_beside
from hpcrl.node.slurm_env import LaunchInfo, check_world_size, parse_time_unix_s, read_launch_info
from hpcrl.run.checkpoint import CheckpointError
from hpcrl.run.node_table import Offer
from hpcrl.run.rank_log import log_to
from hpcrl.run.resume import MAY_CHANGE, OpenedRun, RunIsDone, check_not_done, open_run
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.run.stopping import StopSignal
from hpcrl.start.demand import check_shares, demand_of
from hpcrl.start.preparing import Start, attempt, prepare
from hpcrl.start.watching import start_watchdog
from hpcrl.timing import choose_wait_policy
from hpcrl.topology import Topology, TopologyError, node_map, plan_topology


def run_rank(link: Link, read: Callable[[], Config], stop_signal: StopSignal | None = None) -> int:
    """Start, train, and return the exit code that all ranks share.

    Args:
      link: this rank's connection.
      read: reads the configuration; called on rank 0 alone.
      stop_signal: whose handlers are installed already, so that no signal is missed.

    Raises:
      Exception: a failure that the other ranks don't know of; the caller ends the job.
    """
    world = link.group(range(link.size))
    if world is None:
        raise RuntimeError("every rank belongs to the world")
    try:
        start = _take_seats(link, world, read, stop_signal or StopSignal())
        run = prepare(start)
    except StartError as error:
        if link.rank == 0:
            print(f"hpcrl: {error}", file=sys.stderr, flush=True)
        return error.code
    link.deadline_s = start.seat.config.transport.deadline_s
    link.pulse.beat("started")
    code = run()
    if start.watchdog:
        start.watchdog.stop()
    start.memory.close()
    return code


def _take_seats(link: Link, world: Group, read: Callable[[], Config], signal: StopSignal) -> Start:
    """Agree on configuration, launch, topology and run directory."""

    def read_on_root() -> dict[str, Any] | None:
        return to_dict(read()) if link.rank == 0 else None

    data = attempt(world, link.label, exit_codes.USAGE, (ConfigError,), read_on_root)
    config = parse_config(broadcast_json(world, data, 0))
    attempt(
        world,
        link.label,
        exit_codes.DONE,
        (RunIsDone,),
        lambda: check_not_done(config) if link.rank == 0 else None,
    )
    info: LaunchInfo = attempt(
        world, link.label, exit_codes.LAUNCH, (ValueError,), lambda: read_launch_info()
    )
    problem = check_world_size(info, link.size)
    agree_to_start(world, link.label, Failure(problem, exit_codes.LAUNCH) if problem else None)
    memory = Offer()
    facts = gather_json(world, {**node_facts(info.role), "memory": memory.facts})
    topology: Topology = attempt(
        world,
        link.label,
        exit_codes.USAGE,
        (TopologyError, ConfigError),
        lambda: _plan(config, facts),
    )
    labels = [f"{r} {i}" for r, i in zip(topology.role_of, topology.index_of_role, strict=True)]
    link.label = labels[link.rank]
    node = topology.nodes[topology.node_of[link.rank]]
    threads = threads_beside(config, topology, link.rank)
    link.wait_policy = choose_wait_policy(config.transport.wait, threads, node.num_cores)
    link.deadline_s = config.transport.start_deadline_s
    link.max_message_bytes = config.transport.max_message_bytes
    # Not where environments owe their share of a batch, or followers would wait for a leader.
    in_step = rules_of(config).synchronous or waits_for_weights(config)
    if not in_step and config.env.ranks_per_env == 1:
        link.expendable = frozenset(topology.ranks_of("actor") + topology.ranks_of("worker"))
    choose_threads(config, topology, link.rank)
    signal.stop_at_unix_s = _stop_at(config, info.job_end_unix_s)
    signal.install()
    opened = attempt(
        world,
        link.label,
        exit_codes.USAGE,
        (RunDirError, CheckpointError),
        lambda: _open(config, topology) if link.rank == topology.root_learner else None,
    )
    root = topology.root_learner
    shared = broadcast_json(world, opened and _shared(config, opened), root)
    team = link.team(sorted(set(topology.team_of.values()))) if topology.team_of else None
    seat = Seat(
        *(config, topology, link, world, Path(shared["run_dir"]), shared["restart"]),
        team=Team(team) if team else None,
        code_version=shared["code_version"],
        recorded_bytes=shared["recorded_bytes"],
    )
    log_to(seat.run_dir, link.rank, seat.restart)
    offers = [f["memory"] for f in facts]
    faulthandler.cancel_dump_traceback_later()  # what the start was limited by
    watchdog = start_watchdog(seat, labels[link.rank], memory, offers)
    return Start(seat, signal, opened.checkpoint if opened else None, labels, watchdog, memory)


def _plan(config: Config, facts: list[dict[str, Any]]) -> Topology:
    nodes = node_map(
        [f["host"] for f in facts], [f["gpus"] for f in facts], [f["cores"] for f in facts]
    )
    overrides = {rank: f["role"] for rank, f in enumerate(facts) if f["role"]}
    topology = plan_topology(config.topology, nodes, demand_of(config), overrides)
    check_shares(config, topology)
    return topology


def _stop_at(config: Config, job_end_unix_s: float | None) -> float | None:
    ends = [job_end_unix_s, parse_time_unix_s(config.run.deadline) if config.run.deadline else None]
    known = [end for end in ends if end is not None]
    return min(known) - config.run.deadline_lead_s if known else None


def _shared(config: Config, opened: OpenedRun) -> dict[str, Any]:
    """What one rank finds in the run directory and all need."""
    return {
        "run_dir": str(opened.run_dir.path),
        "restart": opened.restart,
        "code_version": code_version(),
        "recorded_bytes": opened.run_dir.recorded_bytes() if config.recording.enabled else 0,
    }


def _open(config: Config, topology: Topology) -> OpenedRun:
    opened = open_run(
        config.run.dir, to_yaml(config), config_hash(config, MAY_CHANGE), config.run.resume
    )
    run_dir = RunDir(config.run.dir)
    run_dir.write_json(run_dir.topology, topology.to_json())
    print(topology.table())
    for message in opened.messages:
        print(message, flush=True)
    return opened
