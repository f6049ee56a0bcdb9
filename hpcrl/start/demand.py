"""What a configuration asks of the topology, and whether a topology can give it."""

from __future__ import annotations

from hpcrl.config.load import ConfigError
from hpcrl.config.root import Config
from hpcrl.layouts import (
    check_paced_batch,
    check_training_envs,
    check_waiting,
    placement_of,
    rules_of,
)
from hpcrl.topology import RoleDemand, Topology


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
