"""The numbers that follow from configuration and topology, in words, before a run begins."""

from __future__ import annotations

from hpcrl.comm.wire import Layout, unroll_layout
from hpcrl.config.root import Config
from hpcrl.human import format_bytes
from hpcrl.job import (
    credit_unrolls,
    full_batch_rows,
    local_batch_unrolls,
    max_gradient_lag,
    queue_slots_per_source,
    unrolls_per_learner_step,
)
from hpcrl.specs import EnvSpec
from hpcrl.topology import Topology


def derived_numbers(
    config: Config,
    topology: Topology,
    env: EnvSpec | None = None,
    unroll: Layout | None = None,
) -> list[str]:
    """Return one line per subject; what needs an absent argument is left out.

    Args:
      config: the resolved configuration.
      topology: who does what.
      env: the environment's spec, for frames.
      unroll: the unroll message, for bytes.
    """
    frame_skip = env.frame_skip if env else None
    lines = [_environments(config, topology), _learner_step(config, topology, frame_skip)]
    lines += _inference_batch(config, topology)
    if not topology.sharded:
        lines.append(_unrolls(config, topology, unroll))
    lines += _lag_bound(config)
    lines += _evaluation(config, topology)
    lines += _end(config, frame_skip)
    return lines


def plan_lines(config: Config, topology: Topology) -> list[str]:
    """Return `derived_numbers` with all that can be known by making one environment here."""
    try:
        env, unroll = _build(config)
    except Exception as error:
        # The environment may be the user's own code and fail in any way; the rest still holds.
        missing = f"frames and bytes are left out, {config.env.name} can't be made here: {error}"
        return [*derived_numbers(config, topology), missing]
    return derived_numbers(config, topology, env, unroll)


def _build(config: Config) -> tuple[EnvSpec, Layout]:
    from hpcrl.acting.env_batches import make_one
    from hpcrl.brain import Brain

    batch = make_one(config.env)
    batch.close()
    env = EnvSpec.from_json(batch.spec)
    brain = Brain(config, env)
    core_size = brain.make_network(seed=0).state_size
    items = brain.window.items_per_unroll if brain.window else 0
    steps = config.learner.unroll_steps
    return env, unroll_layout(env, brain.behaviour, steps, core_size, items)


def _environments(config: Config, topology: Topology) -> str:
    actors = len(topology.ranks_of("actor")) + len(topology.ranks_of("worker"))
    each, groups = config.env.envs_per_actor, config.env.groups
    return (
        f"environments: {actors} acting ranks x {each} = {actors * each:,}, "
        f"stepped in {groups} groups of {each // groups}"
    )


def _learner_step(config: Config, topology: Topology, frame_skip: int | None) -> str:
    if config.layout == "replay":
        return _replay_step(config, topology, frame_skip)
    unrolls, steps = config.learner.batch_unrolls, config.learner.unroll_steps
    frames = f" = {unrolls * steps * frame_skip:,} frames" if frame_skip else ""
    if topology.sharded:
        shards = len(topology.learner_ranks)
        return (
            f"a gradient of a worker: {unrolls} unrolls x {steps} = {unrolls * steps:,} agent "
            f"steps{frames}, sent in {shards} shard{'s' if shards > 1 else ''}; dropped where "
            f"it is more than {max_gradient_lag(config, topology)} versions behind"
        )
    share = local_batch_unrolls(config, topology)
    return (
        f"a learner step: {unrolls} unrolls x {steps} = {unrolls * steps:,} agent steps{frames}; "
        f"each learner takes {share} unrolls"
    )


def _replay_step(config: Config, topology: Topology, frame_skip: int | None) -> str:
    stored, share = steps_per_learner_step(config), local_batch_unrolls(config, topology)
    frames = f" = {stored * frame_skip:,.0f} frames" if frame_skip else ""
    replay, learners = config.replay, len(topology.learner_ranks)
    return (
        f"a learner step: {config.learner.batch_unrolls} sampled items, {share} of each learner, "
        f"for every {stored:,.0f} agent steps{frames} stored (ratio {replay.ratio:g}); each of "
        f"{learners} learners stores {replay.capacity_unrolls // learners:,} unrolls"
    )


def steps_per_learner_step(config: Config) -> float:
    """Agent steps that the counters advance by at each learner step, on average."""
    return unrolls_per_learner_step(config) * config.learner.unroll_steps


def _inference_batch(config: Config, topology: Topology) -> list[str]:
    actors = max((len(ranks) for ranks in topology.actors_of.values()), default=0)
    if not actors:
        return []
    rows = actors * config.env.envs_per_actor
    return [
        f"an inference batch: dispatched at {full_batch_rows(config, rows)} of {rows} rows, or "
        f"after {1e3 * config.inference.max_wait_s:g} ms"
    ]


def _unrolls(config: Config, topology: Topology, unroll: Layout | None) -> str:
    sources = max(len(ranks) for ranks in topology.clients_of.values())
    slots = sources * queue_slots_per_source(config, topology, sources)
    credits = credit_unrolls(config, topology, sources)

    def size(count: int) -> str:
        return f" ({format_bytes(count * unroll.nbytes)})" if unroll else ""

    return (
        f"unrolls: up to {slots}{size(slots)} in the queue of a learner and {credits}"
        f"{size(credits)} in flight from each of its sources"
        + (f"; one takes {format_bytes(unroll.nbytes)}" if unroll else "")
    )


def _lag_bound(config: Config) -> list[str]:
    bound = config.learner.max_policy_lag
    if bound is None:
        return []
    waits = config.learner.stale_unrolls == "wait"
    kept = "acting waits for newer weights" if waits else "older unrolls are dropped"
    return [f"policy lag: at most {bound} learner steps when it is trained on; {kept}"]


def _evaluation(config: Config, topology: Topology) -> list[str]:
    evaluators, rounds = len(topology.ranks_of("evaluator")), config.evaluation
    if not evaluators:
        return []
    return [
        f"evaluation: rounds of {rounds.episodes} {'greedy' if rounds.greedy else 'sampled'} "
        f"episodes on {evaluators} ranks, every {rounds.every_s:g} s at most, each episode up to "
        f"{rounds.max_episode_steps:,} agent steps"
    ]


def _end(config: Config, frame_skip: int | None) -> list[str]:
    steps = steps_per_learner_step(config)
    stop = config.stop
    limits = [("agent steps", stop.agent_steps, steps)]
    if frame_skip:
        limits.append(("frames", stop.frames, steps * frame_skip))
    return [
        f"the end: {limit:,} {unit} are {-(-limit // per_step):,.0f} learner steps"
        for unit, limit, per_step in limits
        if limit
    ]
