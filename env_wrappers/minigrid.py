"""MiniGrid and BabyAI: Chevalier-Boisvert et al. 2023, arXiv:2306.13831."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from env_wrappers.batch import EnvBatch
from env_wrappers.options import check_choice
from env_wrappers.single import COMMON, make_batch, make_registered, refuse_unknown, resolve
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


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the id `target`, such as "MiniGrid-DoorKey-5x5-v0"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such id, or an option that cannot work.
    """
    resolved = resolve(name, options, DEFAULTS)
    check_choice(name, resolved, "cells", ("planes", "numbers"))
    return make_batch(make_env, name, target, num_envs, seeds, resolved)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make one of them; `options` are all of `DEFAULTS`.

    Raises:
      EnvError: no such id, or kwargs that its constructor doesn't take.
    """
    import minigrid  # noqa: F401 (registers the ids)

    known = [key for key in gymnasium.registry if key.startswith(("MiniGrid-", "BabyAI-"))]
    if target not in known:
        raise refuse_unknown("MiniGrid environment", target, known)
    kwargs = options["kwargs"]
    limit = options["max_episode_steps"]
    # The package keeps its own limit of steps, so a registered one can only shorten it.
    env = make_registered(name, target, kwargs, limit, render_mode=render_mode)
    env = WithoutMission(env)
    return CellPlanes(env) if options["cells"] == "planes" else env
