"""DeepMind Control suite through shimmy: Tassa et al. 2018, arXiv:1801.00690."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import gymnasium

from env_wrappers.single import COMMON, make_registered, registered_id

# kwargs: passed to the task, such as {task_kwargs: {...}}.
DEFAULTS: dict[str, Any] = {**COMMON, "kwargs": {}}


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make the task `target`, such as "cheetah-run"; options: all of `DEFAULTS`.

    Raises:
      EnvError: no such task, or kwargs that it doesn't take.
    """
    # Without this the package asks for a window system, which a compute node doesn't have.
    os.environ.setdefault("MUJOCO_GL", "egl" if render_mode else "disabled")
    import shimmy

    gymnasium.register_envs(shimmy)
    env_id = registered_id("dm_control task", target, ("",), before="dm_control/", after="-v0")
    kwargs, limit = options["kwargs"], options["max_episode_steps"]
    return make_registered(name, env_id, kwargs, limit, render_mode=render_mode)
