"""The NetHack Learning Environment and MiniHack: arXiv:2006.13760, arXiv:2109.13202.

As found with nle 1.3: `reset(seed=)` doesn't seed the game, an episode that ran out of steps says
that it is terminated, too, and observations share the engine's memory (a batch copies them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from env_wrappers.errors import EnvError
from env_wrappers.single import COMMON, make_registered, registered_id

# observation_keys: leaves of the observation, such as glyphs, blstats, message (text as bytes), or
#   glyphs_crop in MiniHack.
# kwargs: passed to the environment's own constructor, such as {character: "val-hum-law-fem"}.
DEFAULTS: dict[str, Any] = {
    **COMMON,
    "observation_keys": ("glyphs", "blstats", "message"),
    "kwargs": {},
}

_ABORTED = -1
"""The game's status where it was given up for want of steps."""


class SeededNetHack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds every game from a random stream of its own, and tells truncation from termination."""

    _rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a game; the seed is of this one and those after it."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        core, display = (int(number) for number in self._rng.integers(2**31 - 1, size=2))
        game: Any = self.env.unwrapped
        game.seed(core, display, reseed=False)
        return self.env.reset(options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Act once."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        out_of_steps = bool(truncated) and int(info["end_status"]) == _ABORTED
        return observation, reward, bool(terminated) and not out_of_steps, bool(truncated), info


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make the id `target`, such as "NetHackScore-v0" or "MiniHack-Room-5x5-v0".

    Raises:
      EnvError: no such id, or arguments that its constructor doesn't take.
    """
    import minihack  # noqa: F401 (the two register their ids)
    import nle  # noqa: F401

    registered_id("NetHack or MiniHack environment", target, ("NetHack", "MiniHack-"))
    keys = tuple(options["observation_keys"])
    kwargs = {"observation_keys": keys, **options["kwargs"]}
    try:
        env = make_registered(name, target, kwargs, options["max_episode_steps"])
    except (ValueError, KeyError) as error:
        raise EnvError(f"{name} can't be made with {kwargs}: {error}") from error
    return SeededNetHack(env)
