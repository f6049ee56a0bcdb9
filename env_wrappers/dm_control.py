"""DeepMind Control suite through shimmy: Tassa et al. 2018, arXiv:1801.00690."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from env_wrappers.batch import EnvBatch
from env_wrappers.single import COMMON, make_batch, make_registered, refuse_unknown, resolve

# kwargs: passed to the task, such as {task_kwargs: {...}}.
DEFAULTS: dict[str, Any] = {**COMMON, "kwargs": {}}

_PREFIX, _SUFFIX = "dm_control/", "-v0"


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the task `target`, such as "cheetah-run"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such task, or an option that cannot work.
    """
    resolved = resolve(name, options, DEFAULTS)
    return make_batch(make_env, name, target, num_envs, seeds, resolved)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make one of them; `options` are all of `DEFAULTS`.

    Raises:
      EnvError: no such task, or kwargs that it doesn't take.
    """
    # Without this the package asks for a window system, which a compute node doesn't have.
    os.environ.setdefault("MUJOCO_GL", "egl" if render_mode else "disabled")
    import shimmy

    gymnasium.register_envs(shimmy)
    env_id = f"{_PREFIX}{target}{_SUFFIX}"
    if env_id not in gymnasium.registry:
        tasks = [
            key.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            for key in gymnasium.registry
            if key.startswith(_PREFIX)
        ]
        raise refuse_unknown("dm_control task", target, tasks)
    kwargs, limit = options["kwargs"], options["max_episode_steps"]
    return make_registered(name, env_id, kwargs, limit, render_mode=render_mode)
