"""MiniGrid and BabyAI: Chevalier-Boisvert et al. 2023, arXiv:2306.13831."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from env_wrappers.options import check_choice
from env_wrappers.single import COMMON, make_registered, registered_id
from env_wrappers.spaces import binary_planes

# kwargs: passed to the environment's own constructor, such as {agent_view_size: 5}.
# cells: "planes": a binary plane for each kind of object, colour and state of a door;
#   "numbers": the three numbers of each cell as MiniGrid gives them, in uint8.
DEFAULTS: dict[str, Any] = {**COMMON, "kwargs": {}, "cells": "planes"}

_KINDS = (11, 6, 4)
"""Numbers of objects, colours and states (the last also tells where an agent looks)."""


class CellPlanes(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The numbers of the cells as planes `<bool>[W, H, 21]`; the direction stays."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        assert isinstance(env.observation_space, gymnasium.spaces.Dict)
        width, height, _ = env.observation_space["image"].shape or (0, 0, 0)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "direction": env.observation_space["direction"],
                "image": binary_planes((width, height, sum(_KINDS))),
            }
        )
        self._one_hot = [np.eye(count, dtype=np.bool_) for count in _KINDS]

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the planes."""
        cells: NDArray[np.uint8] = observation["image"]
        planes = [code[cells[..., axis]] for axis, code in enumerate(self._one_hot)]
        return {"direction": observation["direction"], "image": np.concatenate(planes, -1)}


class WithoutMission(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The observation without its text, which has no fixed array form."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        assert isinstance(env.observation_space, gymnasium.spaces.Dict)
        kept = {k: space for k, space in env.observation_space.items() if k != "mission"}
        self.observation_space = gymnasium.spaces.Dict(kept)

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Drop the text."""
        return {key: value for key, value in observation.items() if key != "mission"}


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make the id `target`, such as "MiniGrid-DoorKey-5x5-v0"; options: all of `DEFAULTS`.

    Raises:
      EnvError: no such id, an option that cannot work, or kwargs that its constructor doesn't take.
    """
    import minigrid  # noqa: F401 (registers the ids)

    check_choice(name, options, "cells", ("planes", "numbers"))
    registered_id("MiniGrid environment", target, ("MiniGrid-", "BabyAI-"))
    kwargs = options["kwargs"]
    limit = options["max_episode_steps"]
    # The package keeps its own limit of steps, so a registered one can only shorten it.
    env = make_registered(name, target, kwargs, limit, render_mode=render_mode)
    env = WithoutMission(env)
    return CellPlanes(env) if options["cells"] == "planes" else env
