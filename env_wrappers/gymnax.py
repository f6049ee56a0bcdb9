"""Gymnax: classic control, bsuite and MinAtar in JAX (Lange 2022)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError
from env_wrappers.jax_start import start_jax
from env_wrappers.jax_vector import COMMON, JaxTask, make_batch
from env_wrappers.options import resolve_options
from env_wrappers.single import refuse_unknown

DEFAULTS: dict[str, Any] = COMMON

_NEVER_STEPS = 2**30


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the id `target`, such as "CartPole-v1" or "Breakout-MinAtar"; options as `DEFAULTS`.

    Raises:
      EnvError: no such id, or an option that cannot work.
    """
    resolved = resolve_options(name, options, DEFAULTS)
    start_jax(name, resolved)
    return make_batch(name, _task(target), seeds, resolved)


@functools.lru_cache(maxsize=8)
def _task(target: str) -> JaxTask:
    import gymnax
    import jax
    from gymnax.registration import registered_envs

    if target not in registered_envs:
        raise refuse_unknown("Gymnax environment", target, registered_envs)
    env, params = gymnax.make(target)
    # Releases before 1.0 count the limit of time among the terminal states.
    endless = params.replace(max_steps_in_episode=_NEVER_STEPS)

    def reset(key: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any]:
        observation, state, reward, _, _ = env.step_env(key, state, action, params)
        return state, observation, reward, env.is_terminal(state, endless)

    seen = jax.eval_shape(reset, jax.ShapeDtypeStruct((2,), np.uint32))[1]
    return JaxTask(
        reset,
        step,
        _space(target, env.observation_space(params), np.dtype(seen.dtype)),
        _space(target, env.action_space(params)),
        int(params.max_steps_in_episode),
    )


def _space(target: str, space: Any, given: np.dtype[Any] | None = None) -> gymnasium.Space[Any]:
    """Gymnasium's space for one of Gymnax, of dtype `given` where the declared can't hold it."""
    kind = type(space).__name__
    if kind == "Discrete":
        return gymnasium.spaces.Discrete(int(space.n))
    if kind != "Box":
        raise EnvError(f"gymnax:{target} has a space of kind {kind}, which can't travel")
    dtype = np.dtype(space.dtype)
    if given is not None and not np.can_cast(given, dtype, "same_kind"):
        dtype = given
    low, high = np.asarray(space.low), np.asarray(space.high)
    if dtype == np.bool_:
        low, high = np.zeros_like(low), np.ones_like(high)
    shape = tuple(space.shape)
    return gymnasium.spaces.Box(
        np.broadcast_to(low, shape).astype(dtype),
        np.broadcast_to(high, shape).astype(dtype),
        shape,
        dtype.type,
    )
