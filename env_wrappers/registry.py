"""From an environment's full name to its family's module, which is imported only then."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError
from env_wrappers.families import FAMILIES, Family, family_named
from env_wrappers.single import make_batch, resolve


def registered_families() -> tuple[str, ...]:
    """The family names that may stand before the colon of an environment's name."""
    return tuple(dict.fromkeys(family.name for family in FAMILIES))


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
      EnvError: the name, an option or a space cannot work, or the family isn't installed; the
        message says what can.
    """
    seeds = [int(seed) for seed in seeds]
    if num_envs < 1 or len(seeds) != num_envs:
        raise EnvError(
            f"{name}: num_envs is {num_envs}, with {len(seeds)} seeds: give one for each"
        )
    if min(seeds) < 0:
        raise EnvError(f"{name}: seeds must not be negative, got {min(seeds)}")
    prefix, target = _split(name)
    family = family_named(prefix)
    if family is not None:
        if communicator is not None:
            raise EnvError(
                f"{name} runs in one process, and env.ranks_per_env asks for several: set it to 1, "
                "or name a function of your own that takes a communicator"
            )
        module = _load(name, family)
        try:
            batch: EnvBatch
            if hasattr(module, "make"):
                batch = module.make(name, target, num_envs, seeds, options or {})
            else:
                resolved = resolve(name, options or {}, module.DEFAULTS)
                batch = make_batch(module.make_env, name, target, num_envs, seeds, resolved)
        except ImportError as error:
            raise EnvError(
                f"{name} needs a package that can't be imported here ({error}): "
                f"{family.install_command or 'install it'}"
            ) from error
        return batch
    from env_wrappers import user_function

    families = registered_families()
    return user_function.make(name, num_envs, seeds, options or {}, families, communicator)


def make_env(
    name: str, options: Mapping[str, Any] | None = None, render_mode: str | None = None
) -> gymnasium.Env[Any, Any] | None:
    """Make one environment as gymnasium has it, without the batch around it.

    Args:
      name: as `make`, of a family.
      options: as `make`.
      render_mode: as `gymnasium.make`.

    Returns:
      The environment; None: the family has batches only.

    Raises:
      EnvError: as `make`.
    """
    prefix, target = _split(name)
    family = family_named(prefix)
    if family is None:
        raise EnvError(f"{name}: {prefix!r} is no family of environments")
    module = _load(name, family)
    if not hasattr(module, "make_env"):
        return None
    resolved = resolve(name, options or {}, module.DEFAULTS)
    env: gymnasium.Env[Any, Any] = module.make_env(name, target, resolved, render_mode)
    return env


def describe(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The spec of an environment, by making one of it and closing it again.

    Raises:
      EnvError: as `make`.
    """
    family = family_named(_split(name)[0])
    rows = family.rows_per_env if family else 1
    batch = make(name, rows, range(rows), options)
    batch.close()
    return batch.spec


def _split(name: str) -> tuple[str, str]:
    prefix, colon, target = name.partition(":")
    if not (prefix and colon and target):
        raise EnvError(
            f"{name!r} is no environment name: write FAMILY:NAME with one of the families "
            f"{', '.join(registered_families())}, or MODULE:FUNCTION"
        )
    return prefix, target


def _load(name: str, family: Family) -> Any:
    """Import the family's module; raise EnvError where its packages are missing."""
    if family.versions() is None:
        own = f" into an interpreter of its own ({family.conflicts})" if family.conflicts else ""
        where = "; then set env.isolation: process and env.python" if family.conflicts else ""
        raise EnvError(
            f"{name} needs {' and '.join(family.packages)}, not installed here: "
            f"{family.install_command}{own}{where}"
        )
    return importlib.import_module(f"env_wrappers.{family.module}")
