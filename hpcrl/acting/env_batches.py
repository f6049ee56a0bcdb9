"""Environments as the configuration asks for them: in this process or in a child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from env_wrappers import EnvBatch, EnvError, IsolatedBatch, Isolation, make
from hpcrl.config.sections import EnvConfig


def make_batch(
    config: EnvConfig,
    num_envs: int,
    seeds: Sequence[int],
    options: Mapping[str, Any] | None = None,
    communicator: Any = None,
) -> EnvBatch:
    """Make a batch of the configured environment.

    Args:
      config: the section.
      num_envs: E.
      seeds: one for each environment.
      options: instead of `config.options`.
      communicator: of the ranks that step the environments together; None: this process alone.

    Raises:
      EnvError: it can't be made.
    """
    options = config.options if options is None else options
    if config.isolation == "none":
        if config.ranks_per_env > 1 and communicator is None:
            from hpcrl.comm.transport import alone

            communicator = alone()
        return make(config.name, num_envs, seeds, options, communicator)
    isolation = Isolation(
        config.python, config.step_timeout_s, config.start_timeout_s, config.max_restarts_per_hour
    )
    return IsolatedBatch(config.name, num_envs, seeds, options, isolation)


def make_one(config: EnvConfig) -> EnvBatch:
    """Make the smallest batch, to look at it: of one row, else of a whole group.

    An environment of several agents takes as many rows.

    Raises:
      EnvError: it can't be made.
    """
    rows = config.envs_per_actor // config.groups
    try:
        return make_batch(config, 1, [0])
    except EnvError:
        if rows <= 1:
            raise
        return make_batch(config, rows, range(rows))
