"""Craftax and Craftax-Classic: Crafter and NetHack in JAX, arXiv:2402.16801."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from env_wrappers.batch import EnvBatch
from env_wrappers.jax_start import start_jax
from env_wrappers.jax_vector import COMMON, JaxTask, make_batch
from env_wrappers.options import resolve_options
from env_wrappers.single import refuse_unknown

# flat: the symbolic observation as one vector of float32, as the package has it. Otherwise its map
#   is a leaf of its own, of binary planes, which takes a thirty-second of the bytes on the wire.
DEFAULTS: dict[str, Any] = {**COMMON, "flat": False}

_NAMES = (
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
)
_NEVER_STEPS = 2**30


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make `target`, such as "Craftax-Classic-Symbolic-v1"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such environment, or an option that cannot work.
    """
    resolved = resolve_options(name, options, DEFAULTS)
    if target not in _NAMES:
        raise refuse_unknown("Craftax environment", target, _NAMES)
    start_jax(name, resolved)
    task = _task(target, resolved["flat"])
    return make_batch(name, task, seeds, resolved)


@functools.lru_cache(maxsize=8)
def _task(target: str, flat: bool) -> JaxTask:
    from craftax.craftax_env import make_craftax_env_from_name

    env = make_craftax_env_from_name(target, auto_reset=False)
    params = env.default_params
    # Their limit of time is one of their terminal states.
    endless = params.replace(max_timesteps=_NEVER_STEPS)
    space, encode = _observations(target, env.observation_space(params), flat)

    def reset(key: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, params)
        return state, encode(observation)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any]:
        observation, state, reward, _, _ = env.step_env(key, state, action, params)
        return state, encode(observation), reward, env.is_terminal(state, endless)

    actions = gymnasium.spaces.Discrete(env.num_actions)
    return JaxTask(reset, step, space, actions, int(params.max_timesteps))


def _observations(target: str, space: Any, flat: bool) -> tuple[gymnasium.Space[Any], Any]:
    """The space of what travels, and the function that makes it from the package's observation."""
    from jax import numpy as jnp

    if "Pixels" in target:
        pixels = gymnasium.spaces.Box(0, 255, tuple(space.shape), np.uint8)
        return pixels, lambda image: jnp.round(image * 255.0).astype(jnp.uint8)
    if flat:
        return gymnasium.spaces.Box(0.0, 1.0, tuple(space.shape), np.float32), lambda vector: vector
    shape = _map_shape(target)
    cells = math.prod(shape)
    split = gymnasium.spaces.Dict(
        {
            "map": gymnasium.spaces.Box(0, 1, shape, np.bool_),
            "inventory": gymnasium.spaces.Box(0.0, 1.0, (space.shape[0] - cells,), np.float32),
        }
    )

    def encode(vector: Any) -> dict[str, Any]:
        return {"map": vector[:cells].reshape(shape) > 0.5, "inventory": vector[cells:]}

    return split, encode


def _map_shape(target: str) -> tuple[int, ...]:
    """Rows, columns and planes of the part of the map that is seen."""
    if "Classic" in target:
        from craftax.craftax_classic.envs.craftax_symbolic_env import get_map_obs_shape
    else:
        from craftax.craftax.envs.craftax_symbolic_env import get_map_obs_shape
    return tuple(get_map_obs_shape())
