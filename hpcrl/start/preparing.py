"""Builds this rank's part of the job: environments, network, and the loop of its role."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl import exit_codes
from hpcrl.comm.leaving import leave
from hpcrl.comm.link import Group
from hpcrl.comm.packing import check_length
from hpcrl.comm.startup import (
    Failure,
    agree_to_start,
    broadcast_json,
    check_fabric,
    check_same,
)
from hpcrl.comm.wire import digest, reply_layout, step_layout
from hpcrl.job import ACTOR_STAGES, Job, Seat
from hpcrl.run.checkpoint import Checkpoint
from hpcrl.run.node_table import Offer
from hpcrl.run.run_dir import RunDirError
from hpcrl.run.stopping import StopSignal
from hpcrl.run.watchdog import Watchdog
from hpcrl.specs import EnvSpec
from hpcrl.start.demand import demand_of
from hpcrl.start.plan_numbers import derived_numbers
from hpcrl.topology.shards import shard_bounds


class Start(NamedTuple):
    """What a rank holds when start-up is through."""

    seat: Seat
    signal: StopSignal
    checkpoint: Checkpoint | None
    labels: list[str]
    watchdog: Watchdog | None
    memory: Offer


def attempt(
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


def prepare(start: Start) -> Callable[[], int]:
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

    groups: Sequence[Any] = attempt(
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
        step = step_layout(env, job.rows_per_slot, len(ACTOR_STAGES))
        check_length(step.nbytes, config.transport.max_message_bytes, config.transport.compression)
        return brain, job

    brain, job = attempt(seat.world, seat.link.label, exit_codes.USAGE, (ValueError,), build)
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
    source = attempt(
        job.world,
        label,
        exit_codes.USAGE,
        (ValueError, MemoryError),
        lambda: learners.make_source(job, brain),
    )
    learner = attempt(
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
    server = attempt(
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
