"""DeepMind Lab: arXiv:1612.03801, through the package `dmlab-gym` 0.2 under Python 3.13.

Its engine lives once in a process, so a batch has one environment; `env.isolation: process` gives
every group a process. The engine's own limit of time can't be told from a termination, since
it stops running either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError
from env_wrappers.options import check_choice, check_range
from env_wrappers.single import COMMON, make_batch, refuse_unknown, resolve

# action_set: "impala" is the nine actions of IMPALA's table D.2; "engine" the seven numbers.
# action_repeat: frames of the engine per step, with the same action; the rewards are added up.
# width, height, fps, renderer: of the engine.
# config: further settings of the level, names and values as text.
DEFAULTS: dict[str, Any] = {
    **COMMON,
    "action_set": "impala",
    "action_repeat": 4,
    "width": 96,
    "height": 72,
    "fps": 60,
    "renderer": "software",
    "config": {},
}


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action `repeat` times, and seeds every episode from one random stream."""

    def __init__(self, env: gymnasium.Env[Any, Any], repeat: int):
        super().__init__(env)
        self._repeat = repeat
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the seed is of this one and those after it."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        return self.env.reset(seed=int(self._rng.integers(2**31 - 1)), options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act, until the episode ends or the action was taken often enough."""
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, bool(terminated), bool(truncated), info


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the level `target`, such as "lt_chasm"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such level, several environments, no engine, or an option that cannot work.
    """
    resolved = resolve(name, options, DEFAULTS)
    check_choice(name, resolved, "action_set", ("impala", "engine"))
    check_choice(name, resolved, "renderer", ("software", "hardware"))
    for key in ("action_repeat", "width", "height", "fps"):
        check_range(name, resolved, key, 1)
    if num_envs > 1:
        raise EnvError(
            f"{name}: {num_envs} environments in one process, and the engine can be there once "
            "only: set env.groups to env.envs_per_actor, and env.isolation to process"
        )
    return make_batch(make_env, name, target, num_envs, seeds, resolved)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make one level; `options` are all of `DEFAULTS`.

    Raises:
      EnvError: no such level, or the engine isn't built.
    """
    import dmlab_gym

    if target not in dmlab_gym.ALL_LEVELS:
        raise refuse_unknown("level of DeepMind Lab", target, dmlab_gym.ALL_LEVELS)
    sizes = {key: options[key] for key in ("renderer", "width", "height", "fps")}
    try:
        env: Any = dmlab_gym.DmLabEnv(target, render_mode=render_mode, **sizes, **options["config"])
    except ImportError as error:
        raise EnvError(
            f"{name}: the engine isn't built ({error}): `dmlab-gym build` builds it with Podman or "
            "Docker and access to the internet, and installs it into its interpreter"
        ) from error
    if options["action_set"] == "impala":
        env = dmlab_gym.ActionDiscretize(env)
    env = ActionRepeat(env, options["action_repeat"])
    if options["max_episode_steps"]:
        env = gymnasium.wrappers.TimeLimit(env, options["max_episode_steps"])
    return env
