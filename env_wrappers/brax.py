"""Brax: rigid bodies in JAX (Freeman et al. 2021, arXiv:2106.13281)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError
from env_wrappers.jax_start import start_jax
from env_wrappers.jax_vector import COMMON, JaxTask, make_batch
from env_wrappers.options import check_choice, resolve_options
from env_wrappers.single import refuse_unknown

# backend: of the physics; "spring" and "positional" are the faster, "generalized" and "mjx" the
#   more exact ones. Rewards of different backends can't be compared.
# kwargs: passed to the environment's own constructor, such as {ctrl_cost_weight: 0.1}.
DEFAULTS: dict[str, Any] = {**COMMON, "backend": "generalized", "kwargs": {}}

_BACKENDS = ("generalized", "mjx", "positional", "spring")
_EPISODE_STEPS = 1000


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make `target`, such as "ant" or "inverted_pendulum"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such environment, or an option that cannot work.
    """
    resolved = resolve_options(name, options, DEFAULTS)
    check_choice(name, resolved, "backend", _BACKENDS)
    start_jax(name, resolved)
    task = _task(name, target, resolved["backend"], json.dumps(resolved["kwargs"]))
    return make_batch(name, task, seeds, resolved)


@functools.lru_cache(maxsize=8)
def _task(name: str, target: str, backend: str, kwargs: str) -> JaxTask:
    import jax
    from brax import envs

    if target not in envs._envs:
        raise refuse_unknown("Brax environment", target, list(envs._envs))
    try:
        env = envs.get_environment(target, backend=backend, **json.loads(kwargs))
    except (TypeError, ValueError) as error:
        raise EnvError(
            f"{name} can't be made with backend {backend} and kwargs {kwargs}: {error}"
        ) from error

    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, state.obs

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any]:
        state = env.step(state, action)
        return state, state.obs, state.reward, state.done > 0

    shape = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), np.uint32)).obs
    return JaxTask(
        reset,
        step,
        _observation_space(shape),
        gymnasium.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32),
        _EPISODE_STEPS,
    )


def _observation_space(shape: Any) -> gymnasium.Space[Any]:
    """Unbounded numbers, in the nesting of the observation."""
    if isinstance(shape, Mapping):
        inner = {key: _observation_space(value) for key, value in shape.items()}
        return gymnasium.spaces.Dict(inner)
    return gymnasium.spaces.Box(-np.inf, np.inf, tuple(shape.shape), np.float32)
