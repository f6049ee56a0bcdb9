"""Any environment that is registered with gymnasium, by its id."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.options import check_choice
from env_wrappers.single import COMMON, make_batch, make_registered, resolve

# kwargs: passed to the environment's own constructor.
# vectorization: "sync" makes single environments, each with its own seed; "native" uses the
#   vector environment that is registered with the id, seeded once for the whole batch.
DEFAULTS: dict[str, Any] = {**COMMON, "kwargs": {}, "vectorization": "sync"}


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the id `target`, such as "CartPole-v1"; "module:Id-v0" imports the module first.

    Raises:
      EnvError: the id is unknown, its package missing, or an option cannot work.
    """
    resolved = resolve(name, options, DEFAULTS)
    check_choice(name, resolved, "vectorization", ("sync", "native"))
    if resolved["vectorization"] == "native":
        _check_registered(name, target)
        return _native(name, target, num_envs, seeds, resolved)
    return make_batch(make_env, name, target, num_envs, seeds, resolved)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make one of them; `options` are all of `DEFAULTS`.

    Raises:
      EnvError: the id is unknown, its package missing, or it doesn't take its kwargs.
    """
    _check_registered(name, target)
    more = {} if render_mode is None else {"render_mode": render_mode}
    return make_registered(name, target, options["kwargs"], options["max_episode_steps"], **more)


def _native(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """The vector environment registered with the id."""
    from env_wrappers.vector import VectorBatch

    if gymnasium.spec(target).vector_entry_point is None:
        raise EnvError(f"{name} has no vector environment of its own: use vectorization sync")
    kwargs = dict(options["kwargs"])
    if options["max_episode_steps"]:
        kwargs["max_episode_steps"] = options["max_episode_steps"]
    try:
        envs = gymnasium.make_vec(
            target, num_envs, vectorization_mode="vector_entry_point", **kwargs
        )
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvError(f"{name} cannot be made: {error}") from error
    except TypeError as error:
        raise EnvError(f"{name} doesn't take all of the kwargs {kwargs}: {error}") from error
    return VectorBatch(name, envs, seeds, frame_stack=options["frame_stack"])


def _check_registered(name: str, target: str) -> None:
    """Raise EnvError unless gymnasium knows the id, after importing the module before a colon."""
    module, _, short = target.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise EnvError(
                f"{name}: module {module!r} cannot be imported ({error}); "
                f"is it installed (pip install {module.split('.')[0]})?"
            ) from error
    try:
        gymnasium.spec(short)
    except gymnasium.error.Error as error:
        hint = suggestion(short, gymnasium.registry)
        if short.startswith("ALE/"):
            hint = f"; Atari games have a family of their own: atari:{short[4:].split('-')[0]}"
        raise EnvError(
            f"gymnasium has no environment {short!r} (one that another package registers needs "
            f"the module to import: gym:module:Id-v0){hint}"
        ) from error
