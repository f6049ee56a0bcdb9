"""Layouts: checked combinations of placement, agent and synchrony, which are separate inside."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.config.root import Config
from hpcrl.job import queue_slots_per_source, unroll_shares
from hpcrl.topology import Placement, Topology


@dataclass(frozen=True)
class LayoutRules:
    """What a layout allows.

    Attributes:
      placements: where actions may be chosen; the first is meant by `placement: auto`.
      agents: that learn in it.
      synchronous: whether acting waits for the weights of every learner step.
      asynchronous_gradients: whether workers compute gradients, which the learners, each of which
        holds a shard of the parameters, apply as they come.
      meaning: in one clause, for messages.
    """

    placements: tuple[Placement, ...]
    agents: tuple[str, ...]
    synchronous: bool
    meaning: str
    asynchronous_gradients: bool = False


LAYOUTS: dict[str, LayoutRules] = {
    "seed": LayoutRules(
        ("central",), ("vtrace",), False, "inference ranks act and learners correct for the lag"
    ),
    "impala": LayoutRules(
        ("local",), ("vtrace",), False, "workers act and learners correct for the lag"
    ),
    "sync": LayoutRules(
        ("central", "local"), ("ppo",), True, "acting waits for the weights of every learner step"
    ),
    "async_gradient": LayoutRules(
        ("local",), ("a3c",), False, "learners apply the workers' gradients as they come", True
    ),
    "replay": LayoutRules(
        ("central", "local"),
        ("r2d2", "apex"),
        False,
        "learners draw from a prioritized replay",
    ),
}
"""By the value of the key `layout`."""


def rules_of(config: Config) -> LayoutRules:
    """Return what the configured layout allows."""
    return LAYOUTS[config.layout]


def placement_of(config: Config) -> Placement:
    """Return where actions are chosen: the configured placement, or the layout's own."""
    return rules_of(config).placements[0] if config.placement == "auto" else config.placement


def waits_for_weights(config: Config) -> bool:
    """Return whether acting waits so that no unroll gets older than `learner.max_policy_lag`."""
    learner = config.learner
    bounded = learner.max_policy_lag is not None and not rules_of(config).synchronous
    return bounded and learner.stale_unrolls == "wait"


def check_layout(config: Config) -> None:
    """Check that layout, placement, agent, network and lag bound go together.

    Raises:
      ValueError: they don't; says which and why.
    """
    rules, name = rules_of(config), config.layout
    agent = config.agent.name
    if agent not in rules.agents:
        fitting = [layout for layout, other in LAYOUTS.items() if agent in other.agents]
        raise ValueError(
            f"agent.name {agent} learns in layout: {' or '.join(fitting)}, got layout: {name}, "
            f"where {rules.meaning} and whose agents are {', '.join(rules.agents)}"
        )
    if config.placement != "auto" and config.placement not in rules.placements:
        raise ValueError(
            f"placement {config.placement} does not go with layout: {name}, where {rules.meaning}: "
            f"its placement is {' or '.join(rules.placements)}"
        )
    if isinstance(config.agent, PPOConfig):
        _check_minibatches(config, config.agent)
    _check_lag_bound(config)
    if rules.asynchronous_gradients:
        _check_asynchronous(config)
    elif config.learner.max_gradient_lag != "auto":
        raise ValueError(
            f"learner.max_gradient_lag {config.learner.max_gradient_lag} has no meaning in layout: "
            f"{name}, where {rules.meaning}: leave it at auto"
        )


def _check_asynchronous(config: Config) -> None:
    learner, envs = config.learner, config.env.envs_per_actor
    if learner.max_gradient_lag == 0:
        raise ValueError(
            "learner.max_gradient_lag is 0: layout: async_gradient would throw away each gradient "
            "that another worker was faster than, and be a slow layout: sync; give at least 1, or "
            "auto for four times the number of workers"
        )
    if learner.batch_unrolls % envs:
        below = learner.batch_unrolls // envs * envs
        fitting = f"{below} or {below + envs}" if below else str(envs)
        raise ValueError(
            f"layout: {config.layout} takes equally many unrolls of each of a worker's {envs} "
            f"environments (env.envs_per_actor) for a gradient, and learner.batch_unrolls "
            f"{learner.batch_unrolls} is not a multiple of them: set it to {fitting}"
        )
    if learner.micro_batches > learner.batch_unrolls:
        raise ValueError(
            f"learner.micro_batches {learner.micro_batches} is more than learner.batch_unrolls "
            f"{learner.batch_unrolls}: a part of a gradient would be empty"
        )
    if learner.precision == "float16":
        raise ValueError(
            f"learner.precision float16 needs a loss scale that all agree on, and in layout: "
            f"{config.layout} no two workers agree on anything: use bfloat16 or float32"
        )
    if config.topology.evaluators not in ("auto", 0):
        raise ValueError(_no_evaluators(config))


def _no_evaluators(config: Config) -> str:
    return (
        f"topology.evaluators {config.topology.evaluators}: an evaluator asks one learner for "
        f"whole weights, and in layout: {config.layout} each learner holds a shard of them: set it "
        "to 0, and measure checkpoints with `hpcrl eval`"
    )


def _check_lag_bound(config: Config) -> None:
    bound, rules = config.learner.max_policy_lag, rules_of(config)
    if bound is None:
        if config.learner.stale_unrolls == "wait":
            raise ValueError(
                "learner.stale_unrolls wait says what to do at a bound, and learner.max_policy_lag "
                "is none: set it, to at least 1"
            )
        return
    if config.layout == "replay":
        raise ValueError(
            f"learner.max_policy_lag {bound} bounds nothing in layout: replay, where items are "
            "learned from again and again while they are stored: replay.capacity_unrolls bounds "
            "their age"
        )
    if rules.asynchronous_gradients:
        raise ValueError(
            f"learner.max_policy_lag {bound} bounds nothing in layout: {config.layout}, where each "
            "gradient is computed with the weights that acted: learner.max_gradient_lag bounds "
            "how late it may be"
        )
    if bound == 0 and not rules.synchronous:
        raise ValueError(
            f"learner.max_policy_lag 0 in layout: {config.layout}, where {rules.meaning}: while a "
            "learner step is computed nothing could be acted that it does not make too old; "
            "that is layout: sync. Set it to at least 1"
        )


def _check_minibatches(config: Config, agent: PPOConfig) -> None:
    if config.network.core != "none" and agent.minibatch_over == "transitions":
        raise ValueError(
            f"network.core {config.network.core} needs agent.minibatch_over: unrolls: shuffled "
            "single transitions have no rows before them to carry the recurrent state"
        )


def check_paced_batch(config: Config, topology: Topology) -> None:
    """Check that a synchronous batch is an equal number of unrolls of every environment.

    Raises:
      ValueError: it isn't; names the sizes that are.
    """
    if not rules_of(config).synchronous:
        return
    acting_ranks = topology.ranks_of("actor") + topology.ranks_of("worker")
    learners = len(topology.learner_ranks)
    per_cell = Counter(topology.cell_of[rank] for rank in acting_ranks)
    envs = [per_cell[cell] * config.env.envs_per_actor for cell in range(learners)]
    if len(set(envs)) > 1:
        raise ValueError(
            f"layout: {config.layout} needs as many environments in the cell of each learner, got "
            f"{envs}: make topology.actors a multiple of {learners} learners"
        )
    unrolls, total = config.learner.batch_unrolls, sum(envs)
    if unrolls % total:
        below = unrolls // total * total
        fitting = f"{below} or {below + total}" if below else str(total)
        raise ValueError(
            f"layout: {config.layout} takes equally many unrolls of each of {total} environments, "
            f"and learner.batch_unrolls {unrolls} is not a multiple of them: set it to {fitting}"
        )
    if isinstance(config.agent, PPOConfig):
        rows = 1 if config.agent.minibatch_over == "unrolls" else config.learner.unroll_steps
        share = unrolls // learners * rows // config.agent.minibatches
        if share < config.learner.micro_batches:
            raise ValueError(
                f"agent.minibatches {config.agent.minibatches}: a minibatch of a learner has "
                f"{share} {config.agent.minibatch_over}, fewer than learner.micro_batches "
                f"{config.learner.micro_batches}"
            )


def check_waiting(config: Config, topology: Topology) -> None:
    """Check that acting which waits for weights can always go on, with all its environments.

    Raises:
      ValueError: it can't; says which inequality does not hold.
    """
    bound = config.learner.max_policy_lag
    if bound is None or not waits_for_weights(config):
        return
    for index, learner in enumerate(topology.learner_ranks):
        shares = unroll_shares(config, topology, learner)
        slots = queue_slots_per_source(config, topology, len(shares))
        for rank, share in shares.items():
            actors = len(topology.actors_of.get(rank, (rank,)))
            _check_source(config, bound, index, rank, share, actors, slots)


def _check_source(
    config: Config, bound: int, learner: int, rank: int, share: int, actors: int, slots: int
) -> None:
    """Check one source of a learner: its share of each batch, its environments, its slots."""
    each, envs = config.env.envs_per_actor, actors * config.env.envs_per_actor
    whose = f"learner.stale_unrolls wait: rank {rank} gives learner {learner} {share} unrolls"
    if envs > share * (bound + 1):
        raise ValueError(
            f"{whose} of each batch (learner.batch_unrolls {config.learner.batch_unrolls}, shared "
            f"by learners and acting ranks) and may begin {share} x (learner.max_policy_lag "
            f"{bound} + 1) = {share * (bound + 1)} ahead of the weights, fewer than its {actors} x "
            f"env.envs_per_actor {each} = {envs} environments, of which some would wait for ever: "
            "raise learner.max_policy_lag or learner.batch_unrolls, or use fewer environments"
        )
    if slots < share:
        raise ValueError(
            f"{whose} of each batch and finds {slots} free slots (learner.queue_unrolls "
            f"{config.learner.queue_unrolls} shared by its acting ranks): {slots} < {share}, a "
            "batch would never be complete; raise learner.queue_unrolls"
        )


def check_training_envs(config: Config, topology: Topology) -> None:
    """Check that some environment of each learner's cell trains: the last ids only measure.

    Raises:
      ValueError: a learner would never get an unroll.
    """
    measuring = getattr(config.agent, "evaluation_envs", 0)
    per_actor = config.env.envs_per_actor
    acting_ranks = topology.ranks_of("actor") + topology.ranks_of("worker")
    training = len(acting_ranks) * per_actor - measuring
    first_id = {rank: topology.index_of_role[rank] * per_actor for rank in acting_ranks}
    fed = {topology.cell_of[rank] for rank, first in first_id.items() if first < training}
    starved = [cell for cell in range(len(topology.learner_ranks)) if cell not in fed]
    if measuring and starved:
        raise ValueError(
            f"agent.evaluation_envs {measuring} leaves {max(training, 0)} of "
            f"{len(acting_ranks) * per_actor} environments for training, and none for "
            f"learner {', '.join(map(str, starved))}: set fewer, or more actors"
        )
