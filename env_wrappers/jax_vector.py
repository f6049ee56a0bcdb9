"""Environments that are JAX functions, as one gymnasium vector environment.

A step of the whole batch, with the resets of those environments that are done, is one compiled
call. Under `vmap` a conditional reset would be computed for every environment at every step, which
costs dozens of steps where worlds are generated; so the rows that are done are gathered in
groups of a fixed size, reset, and scattered back, until none is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from env_wrappers.batch import EnvBatch
from env_wrappers.jax_start import JAX_OPTIONS
from env_wrappers.options import check_range
from env_wrappers.vector import VectorBatch

# max_episode_steps: agent steps after which an episode is truncated; 0: as the family has it.
# frame_stack: time steps that the network sees stacked in box leaves.
COMMON: dict[str, Any] = {"max_episode_steps": 0, "frame_stack": 1, **JAX_OPTIONS}

_RESETS_AT_ONCE = 16
_NO_LIMIT_STEPS = 2**31 - 1

Pytree = Any
"""Nested arrays, as JAX takes and gives them."""


@dataclass(frozen=True, eq=False)
class JaxTask:
    """One environment as pure functions.

    Attributes:
      reset: from a key `<uint32>[2]` to (state, observation).
      step: from (key, state, action) to (state, observation, reward, terminated); it knows no
        limit of time.
      observation_space: of one environment.
      action_space: of one environment; a Box or Discrete.
      max_steps: agent steps after which an episode is truncated; 0: none.
    """

    reset: Callable[[Any], tuple[Pytree, Pytree]]
    step: Callable[[Any, Pytree, Any], tuple[Pytree, Pytree, Any, Any]]
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    max_steps: int


class JaxVectorEnv(VectorEnv[Any, Any, Any]):
    """E environments of one task in gymnasium's SAME_STEP mode.

    Each environment has a random stream of its own, from its own seed, so that what it does
    depends on neither E nor its place. `info["final_obs"]` has the observations before any
    reset, for all rows. The arrays returned are read-only views of what JAX holds.
    """

    def __init__(self, task: JaxTask, seeds: Sequence[int], max_episode_steps: int = 0):
        """Compile the task for one environment per seed.

        Args:
          task: what to step.
          seeds: of the first reset, one for each environment.
          max_episode_steps: instead of the task's own; 0: that.
        """
        self.num_envs = num_envs = len(seeds)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = task.observation_space
        self.single_action_space = task.action_space
        self.observation_space = batch_space(task.observation_space, num_envs)
        self.action_space = batch_space(task.action_space, num_envs)
        self._limit = np.int32(max_episode_steps or task.max_steps or _NO_LIMIT_STEPS)
        self._action_dtype = _action_dtype(task.action_space)
        self._first, self._next = _compiled(task, num_envs)
        self._keys: Any = _keys([np.random.SeedSequence(each) for each in seeds])
        self._state: Pytree = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode everywhere; a seed starts other random streams."""
        if seed is not None:
            self._keys = _keys(np.random.SeedSequence(seed).spawn(self.num_envs))
        (self._keys, *self._state), observation = self._first(np.asarray(self._keys))
        return _to_numpy(observation), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take one step everywhere; see `gymnasium.vector.VectorEnv`."""
        carry = (self._keys, *self._state)
        (self._keys, *self._state), newest, final, reward, terminated, truncated = self._next(
            carry, np.asarray(actions, self._action_dtype), self._limit
        )
        ended, cut = np.asarray(terminated), np.asarray(truncated)
        info = {"final_obs": _to_numpy(final)} if (ended | cut).any() else {}
        return _to_numpy(newest), np.asarray(reward), ended, cut, info


def make_batch(
    name: str, task: JaxTask, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make a batch of `task`, one for each seed; `options` are resolved and include `COMMON`.

    Raises:
      EnvError: an option cannot work, or a space can't travel.
    """
    check_range(name, options, "max_episode_steps", 0)
    check_range(name, options, "frame_stack", 1)
    envs = JaxVectorEnv(task, seeds, options["max_episode_steps"])
    return VectorBatch(name, envs, None, frame_stack=options["frame_stack"])


def _keys(streams: Sequence[np.random.SeedSequence]) -> NDArray[np.uint32]:
    """Keys `<uint32>[E, 2]` of JAX's generator."""
    return np.stack([stream.generate_state(2) for stream in streams])


def _action_dtype(space: gymnasium.Space[Any]) -> np.dtype[Any]:
    """The dtype of actions as JAX has it, which is at most 32 bits wide."""
    kind = np.dtype(space.dtype or np.float32).kind
    return np.dtype(np.float32 if kind == "f" else np.int32)


def _to_numpy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _to_numpy(value) for key, value in tree.items()}
    return np.asarray(tree)


# The groups of an actor share what is compiled for them. Tasks are cached by their families.
@functools.lru_cache(maxsize=8)
def _compiled(task: JaxTask, num_envs: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(first, next) for E environments, ahead of any use, so that no step waits for a compiler.

    `first(keys <uint32>[E, 2])` gives (carry, observation). `next(carry, actions, limit)`
    gives (carry, observation, final observation, reward, terminated, truncated).
    """
    import jax
    from jax import numpy as jnp

    first, following = _batch_functions(task, num_envs)
    lowered = jax.jit(first).lower(jax.ShapeDtypeStruct((num_envs, 2), jnp.uint32))
    carry = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), lowered.out_info[0])
    shape = (num_envs, *(task.action_space.shape or ()))
    actions = jax.ShapeDtypeStruct(shape, _action_dtype(task.action_space))
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    return lowered.compile(), jax.jit(following).lower(carry, actions, limit).compile()


def _batch_functions(task: JaxTask, num_envs: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of `_compiled`, not compiled yet."""
    import jax
    from jax import lax
    from jax import numpy as jnp

    def strong(tree: Pytree) -> Pytree:
        # A dtype that Python numbers left weak would make the step's state another type.
        return jax.tree.map(lambda a: lax.convert_element_type(a, jnp.asarray(a).dtype), tree)

    def start(key: Any) -> tuple[Pytree, Pytree]:
        state, observation = task.reset(key)
        return strong(state), strong(observation)

    def advance(key: Any, state: Pytree, action: Any) -> tuple[Pytree, Pytree, Any, Any]:
        new, observation, reward, terminated = task.step(key, state, action)
        return (
            jax.tree.map(lambda a, old: jnp.asarray(a).astype(old.dtype), new, state),
            strong(observation),
            jnp.asarray(reward).astype(jnp.float32).reshape(()),
            jnp.asarray(terminated).astype(jnp.bool_).reshape(()),
        )

    def split(keys: Any, parts: int) -> Any:
        return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, parts))(keys), 1, 0)

    def first(keys: Any) -> tuple[Pytree, Pytree]:
        kept, used = split(keys, 2)
        state, observation = jax.vmap(start)(used)
        return (kept, state, jnp.zeros(num_envs, jnp.int32)), observation

    def restart(keys: Any, done: Any, state: Pytree, observation: Pytree) -> tuple[Pytree, Pytree]:
        def some(loop: Any) -> Any:
            left, state, observation = loop
            rows = jnp.nonzero(left, size=min(_RESETS_AT_ONCE, num_envs), fill_value=num_envs)[0]
            fresh = jax.vmap(start)(keys[rows])
            state, observation = jax.tree.map(
                lambda old, new: old.at[rows].set(new, mode="drop"), (state, observation), fresh
            )
            return left.at[rows].set(False, mode="drop"), state, observation

        loop = lax.while_loop(lambda loop: loop[0].any(), some, (done, state, observation))
        return loop[1], loop[2]

    def following(carry: Pytree, actions: Any, limit: Any) -> Any:
        keys, state, steps = carry
        kept, used, for_resets = split(keys, 3)
        state, final, reward, terminated = jax.vmap(advance)(used, state, actions)
        steps = steps + 1
        truncated = ~terminated & (steps >= limit)
        done = terminated | truncated
        state, newest = restart(for_resets, done, state, final)
        steps = jnp.where(done, 0, steps)
        return (kept, state, steps), newest, final, reward, terminated, truncated

    return first, following
