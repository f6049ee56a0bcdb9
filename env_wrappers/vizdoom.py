"""ViZDoom, first-person shooting on Doom's engine: arXiv:1605.02097, the package `vizdoom`.

As found with vizdoom 1.3: an episode's last observation is all zeros where the game itself ended
it, also at its limit of time. So the limit is kept here, and the game's own is switched off.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import gymnasium

from env_wrappers.options import check_range
from env_wrappers.single import COMMON, make_registered, registered_id

# frame_skip: game tics (35 a second) per step, with the same buttons pressed.
# shrink: every so many-th pixel of the 240x320 ones, in both directions, is observed.
# kwargs: passed to the environment's own constructor.
DEFAULTS: dict[str, Any] = {**COMMON, "frame_skip": 4, "shrink": 2, "kwargs": {}}


class ShrunkScreen(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Every `shrink`-th pixel of every screen; texts, which have no array form, are left out."""

    def __init__(self, env: gymnasium.Env[Any, Any], shrink: int):
        super().__init__(env)
        assert isinstance(env.observation_space, gymnasium.spaces.Dict)
        self._shrink = shrink
        self.observation_space = gymnasium.spaces.Dict(
            {
                key: self._smaller(space)
                for key, space in env.observation_space.items()
                if not isinstance(space, gymnasium.spaces.Text)
            }
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the observation with smaller screens."""
        step = self._shrink
        return {
            key: observation[key][::step, ::step]
            if len(space.shape or ()) == 3
            else observation[key]
            for key, space in self.observation_space.items()  # type: ignore[attr-defined]
        }

    def _smaller(self, space: Any) -> gymnasium.Space[Any]:
        if len(space.shape) != 3:
            return space
        height, width, channels = space.shape
        shape = (-(-height // self._shrink), -(-width // self._shrink), channels)
        return gymnasium.spaces.Box(0, 255, shape, space.dtype)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make the id `target`, such as "VizdoomBasic-v1"; options: all of `DEFAULTS`.

    Raises:
      EnvError: no such id, or options or arguments that cannot work.
    """
    from vizdoom import gymnasium_wrapper  # noqa: F401 (registers the ids)

    check_range(name, options, "frame_skip", 1)
    check_range(name, options, "shrink", 1)
    registered_id("ViZDoom environment", target, ("Vizdoom",))
    kwargs = {"frame_skip": options["frame_skip"], **options["kwargs"]}
    env = make_registered(name, target, kwargs, 0, render_mode=render_mode)
    game: Any = env.unwrapped.game  # type: ignore[attr-defined]
    tics = game.get_episode_timeout()
    limit = options["max_episode_steps"] or math.ceil(tics / options["frame_skip"])
    game.set_episode_timeout(0)
    # The engine writes its settings when it ends, into the working directory if it isn't told.
    game.set_doom_config_path(os.path.join(tempfile.gettempdir(), f"vizdoom-{os.getpid()}.ini"))
    env = ShrunkScreen(env, options["shrink"])
    return gymnasium.wrappers.TimeLimit(env, limit) if limit else env
