"""Families of single gymnasium environments: their common options, and the batch made of them.

Such a family's module has its options, `DEFAULTS`, which include `COMMON`, and

    make_env(name, target, options, render_mode=None) -> gymnasium.Env

whose `options` are all of them, of the right types; it checks what they may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import gymnasium

from env_wrappers.errors import EnvError, suggestion
from env_wrappers.options import check_range, resolve_options
from env_wrappers.sync import SyncBatch

# max_episode_steps: agent steps after which an episode is truncated; 0: as the family has it.
# frame_stack: time steps that the network sees stacked in box leaves.
COMMON: dict[str, Any] = {"max_episode_steps": 0, "frame_stack": 1}


class MakeEnv(Protocol):
    """Makes one environment of a family."""

    def __call__(
        self,
        name: str,
        target: str,
        options: Mapping[str, Any],
        render_mode: str | None = None,
    ) -> gymnasium.Env[Any, Any]:
        """Make it; see the module."""


def resolve(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a family of single environments, checked as far as all of them share them.

    Raises:
      EnvError: as `resolve_options`.
    """
    resolved = resolve_options(name, options, defaults)
    check_range(name, resolved, "max_episode_steps", 0)
    check_range(name, resolved, "frame_stack", 1)
    return resolved


def make_batch(
    make_env: MakeEnv,
    name: str,
    target: str,
    num_envs: int,
    seeds: Sequence[int],
    options: Mapping[str, Any],
) -> SyncBatch:
    """Make `num_envs` environments and step them one after the other.

    Args:
      make_env: of the family.
      name: full name.
      target: what follows the colon.
      num_envs: E.
      seeds: one for each.
      options: all of them, as `resolve` gives them.

    Raises:
      EnvError: one can't be made, or a space can't travel.
    """
    envs = [make_env(name, target, options) for _ in range(num_envs)]
    return SyncBatch(name, envs, seeds, options["frame_stack"])


def make_registered(
    name: str, env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int, **more: Any
) -> gymnasium.Env[Any, Any]:
    """Make the environment that is registered with gymnasium as `env_id`.

    Args:
      name: full name, for messages.
      env_id: of the registry.
      kwargs: of its constructor, the user's.
      max_episode_steps: 0: as registered.
      more: further arguments of `gymnasium.make`.

    Raises:
      EnvError: a package is missing, or the constructor doesn't take `kwargs`.
    """
    if max_episode_steps:
        more["max_episode_steps"] = max_episode_steps
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **more, **kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvError(f"{name} cannot be made: {error}") from error
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise EnvError(f"{name} doesn't take all of the kwargs {dict(kwargs)}: {error}") from error


def registered_id(
    what: str, target: str, prefixes: tuple[str, ...], before: str = "", after: str = ""
) -> str:
    """The id of gymnasium's registry that `target` is short for.

    Args:
      what: the environments that are looked through, for the message.
      target: the id without `before` and `after`.
      prefixes: how such targets begin.
      before: what all of these ids begin with.
      after: what they end with.

    Raises:
      EnvError: there is none; the message has the closest ones.
    """
    ids = {
        key.removeprefix(before).removesuffix(after): key
        for key in gymnasium.registry
        if key.startswith(tuple(before + prefix for prefix in prefixes)) and key.endswith(after)
    }
    if target not in ids:
        raise refuse_unknown(what, target, list(ids))
    return ids[target]


def refuse_unknown(what: str, target: str, known: Sequence[str]) -> EnvError:
    """The error for a name that a family doesn't have, with the closest ones or all of them."""
    hint = suggestion(target, known) or f"; there are: {', '.join(sorted(known))}"
    return EnvError(f"there is no {what} {target!r}{hint}")
