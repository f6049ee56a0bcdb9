"""The user's own environment: `module.path:function`, which returns a gymnasium environment."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.options import check_range, resolve_options
from env_wrappers.sync import SyncBatch

# These are handled here unless the function has a parameter of that name.
# frame_stack: time steps that the network sees stacked in box leaves.
# autoreset_mode: of a vector environment that doesn't declare it in its metadata.
DEFAULTS: dict[str, Any] = {"frame_stack": 1, "autoreset_mode": ""}


def make(
    name: str,
    num_envs: int,
    seeds: Sequence[int],
    options: Mapping[str, Any],
    families: Sequence[str] = (),
    communicator: Any = None,
) -> EnvBatch:
    """Call `function(**options)` for a `gymnasium.Env` or a vector environment.

    A function that takes `num_envs` gets it, one that takes `communicator` the MPI communicator of
    the ranks that call it together. A single environment is made anew for each of the
    batch. The working directory is searched for the module last.

    Args:
      name: "module.path:function".
      num_envs: E.
      seeds: one for each environment.
      options: arguments of the function, and `DEFAULTS`.
      families: names that might have been meant instead of a module's.
      communicator: of the ranks that step these environments together; None: no other rank does.

    Raises:
      EnvError: no such module or function, options that it doesn't take, or a result that is
        no environment or one of another number of environments.
    """
    build = _load(name, families)
    parameters = inspect.signature(build).parameters
    own = {k: v for k, v in options.items() if k in DEFAULTS and k not in parameters}
    kwargs = {k: v for k, v in options.items() if k not in own}
    resolved = resolve_options(name, own, DEFAULTS)
    check_range(name, resolved, "frame_stack", 1)
    filled = {"num_envs": num_envs} if "num_envs" in parameters else {}
    filled |= _communicator_argument(name, parameters, communicator)
    _check_kwargs(name, build, kwargs, filled)
    kwargs |= filled
    first = build(**kwargs)
    if isinstance(first, gymnasium.vector.VectorEnv):
        if first.num_envs != num_envs:
            raise EnvError(
                f"{name} returned a vector of {first.num_envs} environments, asked for {num_envs}"
            )
        from env_wrappers.vector import VectorBatch

        return VectorBatch(name, first, seeds, resolved["autoreset_mode"], resolved["frame_stack"])
    if not isinstance(first, gymnasium.Env):
        raise EnvError(
            f"{name} returned a {type(first).__name__}, expected a gymnasium.Env or "
            "gymnasium.vector.VectorEnv"
        )
    envs = [first, *(build(**kwargs) for _ in range(num_envs - 1))]
    if len({id(env) for env in envs}) < num_envs:
        raise EnvError(f"{name} returned the same environment twice; it must make a new one")
    return SyncBatch(name, envs, seeds, resolved["frame_stack"])


def _load(name: str, families: Sequence[str]) -> Callable[..., Any]:
    """Import the function."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module is there, but something that it imports is not
        raise EnvError(
            f"{name}: {module!r} is neither a family of environments ({', '.join(families)}) nor "
            f"a module that can be imported{suggestion(module, families)}"
        ) from error
    build = getattr(loaded, function, None)
    if build is None:
        raise EnvError(
            f"{name}: module {module!r} has no {function!r}{suggestion(function, dir(loaded))}"
        )
    if not callable(build):
        raise EnvError(f"{name}: {function!r} is a {type(build).__name__}, not a function")
    return build


def _communicator_argument(
    name: str, parameters: Mapping[str, inspect.Parameter], communicator: Any
) -> dict[str, Any]:
    parameter = parameters.get("communicator")
    if communicator is not None:
        if parameter is None:
            raise EnvError(
                f"{name} takes no `communicator`, and env.ranks_per_env has several ranks for each "
                "environment: each of them would step one of its own; set it to 1"
            )
        return {"communicator": communicator}
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        raise EnvError(
            f"{name} needs a communicator: set env.ranks_per_env to 2 or more, or give the "
            "parameter a default for a process by itself"
        )
    return {}


def _check_kwargs(
    name: str, build: Callable[..., Any], kwargs: Mapping[str, Any], filled: Mapping[str, Any]
) -> None:
    """Raise EnvError unless the function takes exactly these options and what is filled in."""
    for key, reason in (
        ("num_envs", "it follows from the actor's settings"),
        ("communicator", "it follows from env.ranks_per_env"),
    ):
        if key in kwargs:
            raise EnvError(f"{name}: {key} is not an option, {reason}")
    signature = inspect.signature(build)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    known = [key for key in signature.parameters if key not in ("num_envs", "communicator")]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for key in kwargs:
            if key not in known:
                hint = suggestion(key, known) or f"; it takes: {', '.join(known) or 'none'}"
                raise EnvError(f"{name} has no option {key!r}{hint}")
    try:
        signature.bind(**kwargs, **filled)
    except TypeError as error:
        raise EnvError(f"{name} cannot be called with its options: {error}") from error
