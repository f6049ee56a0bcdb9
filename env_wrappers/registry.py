"""From an environment's full name to its family's module, which is imported only then.

A family is one module with `make(name, target, num_envs, seeds, options) -> EnvBatch`, where
`target` is what follows "family:" in the name. A new one needs that file and its line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError

_FAMILIES = {
    "atari": "env_wrappers.atari",
    "external": "env_wrappers.external",
    "gym": "env_wrappers.gymnasium_ids",
    "synthetic": "env_wrappers.synthetic",
}


def registered_families() -> tuple[str, ...]:
    """The family names that may stand before the colon of an environment's name."""
    return tuple(_FAMILIES)


def make(
    name: str,
    num_envs: int,
    seeds: Sequence[int],
    options: Mapping[str, Any] | None = None,
    communicator: Any = None,
) -> EnvBatch:
    """Make a batch of environments.

    Args:
      name: "atari:Breakout", "gym:CartPole-v1", "synthetic:counting", or "module.path:function"
        for the user's own function that returns a gymnasium environment.
      num_envs: E, at least 1.
      seeds: one non-negative number for each environment. The same seeds give the same
        episodes; later episodes go on with the environment's own random stream.
      options: of the family, see `DEFAULTS` in its module.
      communicator: of the ranks that step these environments together, for the user's own
        function; None: this process steps them by itself.

    Raises:
      EnvError: the name, an option or a space cannot work; the message says what can.
    """
    seeds = [int(seed) for seed in seeds]
    if num_envs < 1 or len(seeds) != num_envs:
        raise EnvError(
            f"{name}: num_envs is {num_envs}, with {len(seeds)} seeds: give one for each"
        )
    if min(seeds) < 0:
        raise EnvError(f"{name}: seeds must not be negative, got {min(seeds)}")
    family, colon, target = name.partition(":")
    if not (family and colon and target):
        raise EnvError(
            f"{name!r} is no environment name: write FAMILY:NAME with one of the families "
            f"{', '.join(_FAMILIES)}, or MODULE:FUNCTION"
        )
    if family in _FAMILIES:
        if communicator is not None:
            raise EnvError(
                f"{name} runs in one process, and env.ranks_per_env asks for several: set it to 1, "
                "or name a function of your own that takes a communicator"
            )
        module = importlib.import_module(_FAMILIES[family])
        batch: EnvBatch = module.make(name, target, num_envs, seeds, options or {})
        return batch
    from env_wrappers import user_function

    families = registered_families()
    return user_function.make(name, num_envs, seeds, options or {}, families, communicator)


def describe(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The spec of an environment, by making one of it and closing it again.

    Raises:
      EnvError: as `make`.
    """
    batch = make(name, 1, [0], options)
    batch.close()
    return batch.spec
