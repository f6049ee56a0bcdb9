"""One rank of a training job, from the first collective to the exit code that all share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl import exit_codes
from hpcrl.comm.leaving import leave
from hpcrl.comm.link import Group, Link
from hpcrl.comm.startup import (
    Failure,
    StartError,
    agree_to_start,
    broadcast_json,
    check_fabric,
    check_same,
    gather_json,
)
from hpcrl.comm.team import Team
from hpcrl.comm.wire import digest, reply_layout, step_layout
from hpcrl.config.load import ConfigError, config_hash, parse_config, to_dict, to_yaml
from hpcrl.config.root import Config
from hpcrl.job import Job, Seat
from hpcrl.layouts import (
    check_paced_batch,
    check_training_envs,
    check_waiting,
    placement_of,
    rules_of,
    waits_for_weights,
)
from hpcrl.node.node_facts import choose_threads, node_facts
from hpcrl.node.slurm_env import LaunchInfo, check_world_size, parse_time_unix_s, read_launch_info
from hpcrl.run.checkpoint import Checkpoint, CheckpointError
from hpcrl.run.node_table import Offer
from hpcrl.run.rank_log import log_to
from hpcrl.run.resume import MAY_CHANGE, RunIsDone, check_not_done, open_run
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.run.stopping import StopSignal
from hpcrl.run.watchdog import Watchdog
from hpcrl.specs import EnvSpec
from hpcrl.start.plan_numbers import derived_numbers
from hpcrl.start.watching import start_watchdog
from hpcrl.timing import choose_wait_policy
from hpcrl.topology import RoleDemand, Topology, TopologyError, node_map, plan_topology
from hpcrl.topology.shards import shard_bounds


def demand_of(config: Config) -> RoleDemand:
    """What the layout asks of the topology."""
    sharded = rules_of(config).asynchronous_gradients
    return RoleDemand(
        placement_of(config),
        learner_device="cpu" if sharded else "auto",
        batch_unrolls=None if sharded else config.learner.batch_unrolls,
        ranks_per_env=config.env.ranks_per_env,
        sharded=sharded,
    )


class Start(NamedTuple):
    """What a rank holds when start-up is through."""

    seat: Seat
    signal: StopSignal
    checkpoint: Checkpoint | None
    labels: list[str]
    watchdog: Watchdog | None
    memory: Offer


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
        run = _prepare(start)
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


def _attempt(
    world: Group, label: str, code: int, errors: tuple[type[Exception], ...], act: Callable[[], Any]
) -> Any:
    """Collective: run `act` on this rank; if it fails as users make it fail, all ranks stop."""
    failure, value = None, None
    try:
        value = act()
    except errors as error:
        failure = Failure(str(error), code)
    agree_to_start(world, label, failure)
    return value


def _take_seats(link: Link, world: Group, read: Callable[[], Config], signal: StopSignal) -> Start:
    """Agree on configuration, launch, topology and run directory."""

    def read_on_root() -> dict[str, Any] | None:
        return to_dict(read()) if link.rank == 0 else None

    data = _attempt(world, link.label, exit_codes.USAGE, (ConfigError,), read_on_root)
    config = parse_config(broadcast_json(world, data, 0))
    _attempt(
        world,
        link.label,
        exit_codes.DONE,
        (RunIsDone,),
        lambda: check_not_done(config) if link.rank == 0 else None,
    )
    info: LaunchInfo = _attempt(
        world, link.label, exit_codes.LAUNCH, (ValueError,), lambda: read_launch_info()
    )
    problem = check_world_size(info, link.size)
    agree_to_start(world, link.label, Failure(problem, exit_codes.LAUNCH) if problem else None)
    memory = Offer()
    facts = gather_json(world, {**node_facts(info.role), "memory": memory.facts})
    topology: Topology = _attempt(
        world,
        link.label,
        exit_codes.USAGE,
        (TopologyError, ConfigError),
        lambda: _plan(config, facts),
    )
    labels = [f"{r} {i}" for r, i in zip(topology.role_of, topology.index_of_role, strict=True)]
    link.label = labels[link.rank]
    node = topology.nodes[topology.node_of[link.rank]]
    link.wait_policy = choose_wait_policy(config.transport.wait, len(node.ranks), node.num_cores)
    link.deadline_s = config.transport.start_deadline_s
    link.max_message_bytes = config.transport.max_message_bytes
    # Not where environments owe their share of a batch, or followers would wait for a leader.
    in_step = rules_of(config).synchronous or waits_for_weights(config)
    if not in_step and config.env.ranks_per_env == 1:
        link.expendable = frozenset(topology.ranks_of("actor") + topology.ranks_of("worker"))
    choose_threads(config, topology, link.rank)
    signal.stop_at_unix_s = _stop_at(config, info.job_end_unix_s)
    signal.install()
    opened = _attempt(
        world,
        link.label,
        exit_codes.USAGE,
        (RunDirError, CheckpointError),
        lambda: _open(config, topology) if link.rank == topology.root_learner else None,
    )
    root = topology.root_learner
    shared = broadcast_json(world, opened and [str(opened.run_dir.path), opened.restart], root)
    team = link.team(sorted(set(topology.team_of.values()))) if topology.team_of else None
    seat = Seat(
        *(config, topology, link, world, Path(shared[0]), shared[1]),
        team=Team(team) if team else None,
    )
    log_to(seat.run_dir, link.rank, seat.restart)
    offers = [f["memory"] for f in facts]
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


def check_shares(config: Config, topology: Topology) -> None:
    """Raise ConfigError unless each learner's share of the batch can be had."""
    if topology.sharded:
        return  # a gradient is one worker's own
    unrolls, queue = config.learner.batch_unrolls, config.learner.queue_unrolls
    learners = len(topology.learner_ranks)
    if unrolls % learners:
        raise ConfigError(
            f"learner.batch_unrolls {unrolls} can't be shared by {learners} learners: the "
            "global batch must be a multiple of their number"
        )
    share, parts = unrolls // learners, config.learner.micro_batches
    if parts > share:
        raise ConfigError(
            f"learner.micro_batches {parts} is more than the {share} unrolls of each learner's "
            f"batch ({unrolls} / {learners} learners): a part would be empty"
        )
    if 0 < queue < share and config.layout != "replay":
        raise ConfigError(
            f"learner.queue_unrolls {queue} is less than the {share} unrolls of each learner's "
            f"batch ({unrolls} / {learners} learners): a batch would never be complete"
        )
    try:
        check_paced_batch(config, topology)
        check_waiting(config, topology)
        check_training_envs(config, topology)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _stop_at(config: Config, job_end_unix_s: float | None) -> float | None:
    ends = [job_end_unix_s, parse_time_unix_s(config.run.deadline) if config.run.deadline else None]
    known = [end for end in ends if end is not None]
    return min(known) - config.run.deadline_lead_s if known else None


def _open(config: Config, topology: Topology) -> Any:
    opened = open_run(
        config.run.dir, to_yaml(config), config_hash(config, MAY_CHANGE), config.run.resume
    )
    run_dir = RunDir(config.run.dir)
    run_dir.write_json(run_dir.topology, topology.to_json())
    print(topology.table())
    for message in opened.messages:
        print(message, flush=True)
    return opened


def _prepare(start: Start) -> Callable[[], int]:
    """Build this rank's part; environments and networks are built side by side."""
    seat = start.seat
    role = seat.topology.role_of[seat.rank]
    if role in ("actor", "follower"):
        return _prepare_actor(start, role)
    return _prepare_torch_role(start, role)


def _share_spec(start: Start, own: dict[str, Any] | None) -> EnvSpec:
    """Collective: the first acting rank's spec, which all of them must share."""
    seat = start.seat
    first = seat.topology.ranks_of(demand_of(seat.config).acting_role)[0]
    return EnvSpec.from_json(broadcast_json(seat.world, own, first))


def _connect(start: Start, job: Job, has_unrolls: bool, own_spec: EnvSpec | None) -> None:
    """Collective: both ends of every message agree on its layout, and can talk at all."""
    rows = job.rows_per_slot
    spec = own_spec or job.env
    steps = digest(step_layout(spec, rows, 0), reply_layout(spec, rows))
    check_same(job.world, "step messages", steps, start.labels)
    messages = (job.unroll, *(job.gradients if job.topology.sharded and has_unrolls else ()))
    unrolls = digest(*messages) if has_unrolls else 0
    check_same(job.world, "unrolls and gradients", unrolls, start.labels)
    check_fabric(job.link, job.topology, job.config.transport.start_deadline_s)


def _build_envs(start: Start, role: str) -> Sequence[Any]:
    """Collective: this rank's groups of environments; an evaluator has one."""
    from env_wrappers import EnvError
    from hpcrl.node.devices import announce_gpu

    seat = start.seat
    announce_gpu(seat.topology.device_of[seat.rank], os.environ)

    def build() -> Sequence[Any]:
        if role == "evaluator":
            from hpcrl.roles import evaluator

            return [evaluator.make_envs(seat)]
        from hpcrl.roles import actor

        return actor.make_groups(seat)

    groups: Sequence[Any] = _attempt(
        seat.world,
        seat.link.label,
        exit_codes.USAGE,
        (EnvError,),
        build,
    )
    return groups


def _await_learners(start: Start) -> None:
    """Collective: learners without which this rank has nothing to do are built."""
    for _ in range(2):  # their sources of batches, then the learners themselves
        agree_to_start(start.seat.world, start.seat.link.label, None)


def _prepare_actor(start: Start, role: str) -> Callable[[], int]:
    from hpcrl.roles import actor, follower

    seat = start.seat
    groups = _build_envs(start, role)
    env = _share_spec(start, groups[0].spec)
    agree_to_start(seat.world, seat.link.label, None)
    job = Job(**vars(seat), env=env, behaviour={}, core_size=0)
    _connect(start, job, False, EnvSpec.from_json(groups[0].spec))
    seat.link.group(seat.topology.learner_ranks)
    _await_learners(start)

    def run() -> int:
        if role == "follower" and job.team:
            follower.run(job, groups, job.team)
        else:
            actor.run(job, groups)
        return leave(job, exit_codes.DONE)

    return run


def _prepare_torch_role(start: Start, role: str) -> Callable[[], int]:
    from hpcrl.brain import Brain
    from hpcrl.learning.optim import FlatParameters
    from hpcrl.node.torch_device import rank_device

    seat, config = start.seat, start.seat.config
    groups: Sequence[Any] = ()
    if role in ("worker", "evaluator"):
        groups = _build_envs(start, role)
    else:
        agree_to_start(seat.world, seat.link.label, None)
    env = _share_spec(start, groups[0].spec if role == "worker" else None)

    def build() -> tuple[Brain, Job]:
        brain = Brain(config, env)
        network = brain.make_network(0)
        job = Job(
            **vars(seat),
            env=env,
            behaviour=brain.behaviour,
            core_size=network.state_size,
            replay_items=brain.window.items_per_unroll if brain.window else 0,
            num_parameters=FlatParameters(network).value.numel(),
            metrics=brain.metrics,
        )
        if seat.topology.sharded:
            shard_bounds(job.num_parameters, len(seat.topology.learner_ranks))
        return brain, job

    brain, job = _attempt(seat.world, seat.link.label, exit_codes.USAGE, (ValueError,), build)
    device = rank_device(seat.topology, seat.rank)
    if seat.rank == seat.root:
        print("\n".join(derived_numbers(config, seat.topology, env, job.unroll)), flush=True)
    _connect(start, job, role != "evaluator", EnvSpec.from_json(groups[0].spec) if groups else None)
    group = seat.link.group(seat.topology.learner_ranks)
    if role != "learner":
        _await_learners(start)

        def run() -> int:
            if role == "inference":
                from hpcrl.roles import inference

                inference.run(job, brain, device)
            elif role == "worker" and seat.topology.sharded:
                from hpcrl.roles import gradient_worker

                gradient_worker.run(job, brain, device, groups)
            elif role == "worker":
                from hpcrl.roles import worker

                worker.run(job, brain, device, groups)
            else:
                from hpcrl.roles import evaluator

                evaluator.run(job, brain, device, groups[0])
            return leave(job, exit_codes.DONE)

        return run
    if group is None:
        raise RuntimeError("a learner belongs to the learners' group")
    if seat.topology.sharded:
        return _prepare_server(start, job, brain, group)
    return _prepare_learner(start, job, brain, device, group)


def _prepare_learner(
    start: Start, job: Job, brain: Any, device: Any, group: Group
) -> Callable[[], int]:
    from hpcrl.roles import learner as learners

    label = job.link.label
    source = _attempt(
        job.world,
        label,
        exit_codes.USAGE,
        (ValueError, MemoryError),
        lambda: learners.make_source(job, brain),
    )
    learner = _attempt(
        job.world,
        label,
        exit_codes.USAGE,
        (ValueError,),
        lambda: learners.Learner(job, brain, device, group, source, start.checkpoint),
    )
    return lambda: _learn(start, job, learner, learners)


def _prepare_server(start: Start, job: Job, brain: Any, group: Group) -> Callable[[], int]:
    from hpcrl.roles import parameter_server as servers

    agree_to_start(job.world, job.link.label, None)  # other learners' sources of batches
    server = _attempt(
        job.world,
        job.link.label,
        exit_codes.USAGE,
        (ValueError,),
        lambda: servers.ParameterServer(job, brain, group, start.checkpoint),
    )
    return lambda: _learn(start, job, server, servers)


def _learn(start: Start, job: Job, learner: Any, learners: Any) -> int:
    """Run a learner by the module of its role."""
    if learner.book and start.watchdog:
        learner.book.slow = start.watchdog.slow_ranks
    outcome = learners.run(learner, start.signal)
    code = leave(job, outcome.exit_code, learner.group, learner.poll_last)
    learners.close(learner, outcome)
    if learner.book:
        _print_summary(job.run_dir)
    return code


def _print_summary(run_dir: Path) -> None:
    from rich.console import Console

    from hpcrl.run.progress import choose_mode
    from hpcrl.run.report import summarise, summary_table, write_learning_curve

    try:
        picture = write_learning_curve(run_dir)
    except RunDirError as error:
        print(f"no learning curve: {error}")
        picture = None
    # mpirun may give a rank a terminal of its own where the user has none.
    colours = choose_mode("auto", sys.stdout.isatty(), os.environ) == "live"
    console = Console(force_terminal=colours, no_color=not colours)
    console.print(summary_table(summarise(run_dir)))
    if picture:
        console.print(f"learning curve: {picture}")
