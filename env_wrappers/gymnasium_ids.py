"""Any environment that is registered with gymnasium, by its id."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.options import check_choice, check_range, resolve_options
from env_wrappers.sync import SyncBatch

# kwargs: passed to the environment's own constructor.
# max_episode_steps: agent steps after which an episode is truncated; 0: as registered.
# vectorization: "sync" makes single environments, each with its own seed; "native" uses the
#   vector environment that is registered with the id, seeded once for the whole batch.
# frame_stack: time steps that the network sees stacked in box leaves.
DEFAULTS: dict[str, Any] = {
    "kwargs": {},
    "max_episode_steps": 0,
    "vectorization": "sync",
    "frame_stack": 1,
}


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the id `target`, such as "CartPole-v1"; "module:Id-v0" imports the module first.

    Raises:
      EnvError: the id is unknown, its package missing, or an option cannot work.
    """
    resolved = resolve_options(name, options, DEFAULTS)
    check_choice(name, resolved, "vectorization", ("sync", "native"))
    check_range(name, resolved, "max_episode_steps", 0)
    check_range(name, resolved, "frame_stack", 1)
    kwargs = dict(resolved["kwargs"])
    if resolved["max_episode_steps"]:
        kwargs["max_episode_steps"] = resolved["max_episode_steps"]
    _check_registered(name, target)
    frame_stack = resolved["frame_stack"]
    try:
        if resolved["vectorization"] == "native":
            return _native(name, target, num_envs, seeds, kwargs, frame_stack)
        envs = [gymnasium.make(target, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvError(f"{name} cannot be made: {error}") from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise EnvError(f"{name} doesn't take all of the kwargs {kwargs}: {error}") from error
    return SyncBatch(name, envs, seeds, frame_stack)


def _native(
    name: str,
    target: str,
    num_envs: int,
    seeds: Sequence[int],
    kwargs: dict[str, Any],
    frame_stack: int,
) -> EnvBatch:
    """The vector environment registered with the id."""
    from env_wrappers.vector import VectorBatch

    if gymnasium.spec(target).vector_entry_point is None:
        raise EnvError(f"{name} has no vector environment of its own: use vectorization sync")
    envs = gymnasium.make_vec(target, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    return VectorBatch(name, envs, seeds, frame_stack=frame_stack)


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
