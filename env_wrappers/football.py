"""Google Research Football (Kurach et al. 2020, arXiv:1907.11180), the package `gfootball` 2.10.

The package has the interface of old gym: a step gives four values, and what ended an episode
isn't told. Here an episode that ends because its time is up is truncated. Each episode has an
engine seed of its own, drawn from the environment's random stream.
"""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from env_wrappers.options import check_choice
from env_wrappers.single import COMMON, refuse_unknown

# representation: "smm" is the minimap, a binary plane each for the left team, the right team, the
#   ball and the active player; "simple115v2" is a vector of 115 numbers.
# smm_size: planes of 72x96, "medium" 90x120 or "large" 108x144, as in SEED RL.
# rewards: "scoring" gives 1 for a goal and -1 for one against; "scoring,checkpoints" also 0.1 for
#   each of ten distances to the goal that the ball is brought to.
DEFAULTS: dict[str, Any] = {
    **COMMON,
    "representation": "smm",
    "smm_size": "default",
    "rewards": "scoring",
}

_SMM_SIZES = {"default": (96, 72), "medium": (120, 90), "large": (144, 108)}
_SMM_PLANES = 4
_ACTIONS = 19
_FEATURES = 115


class FootballEnv(gymnasium.Env[NDArray[Any], Any]):
    """One scenario, with one player of the left team under control.

    Observes `<bool>[H, W, 4]`, or `<float32>[115]`.
    """

    def __init__(self, scenario: str, options: Mapping[str, Any]):
        """Start an engine; `options` are all of `DEFAULTS`, checked."""
        self._planes = options["representation"] == "smm"
        width, height = _SMM_SIZES[options["smm_size"]]
        with _quiet():
            from gfootball.env import create_environment

            self._game = create_environment(
                env_name=scenario,
                representation="extracted" if self._planes else options["representation"],
                rewards=options["rewards"],
                channel_dimensions=(width, height),
            )
        self._config = self._game.unwrapped._config
        self.action_space = gymnasium.spaces.Discrete(_ACTIONS)
        self.observation_space = (
            gymnasium.spaces.Box(0, 1, (height, width, _SMM_PLANES), np.bool_)
            if self._planes
            else gymnasium.spaces.Box(-np.inf, np.inf, (_FEATURES,), np.float32)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Kick off; the seed is of this episode and those after it."""
        super().reset(seed=seed)
        engine_seed = int(self.np_random.integers(2**31 - 1))
        self._config["game_engine_random_seed"] = engine_seed
        # The package draws this once, when the engine starts, from Python's own generator.
        self._config["reverse_team_processing"] = bool(engine_seed % 2)
        return self._convert(self._game.reset()), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Act once."""
        observation, reward, done, info = self._game.step(int(action))
        time_is_up = bool(done) and self._time_is_up(info["score_reward"])
        return (
            self._convert(observation),
            float(reward),
            bool(done) and not time_is_up,
            time_is_up,
            {},
        )

    def close(self) -> None:
        """Give the engine back."""
        self._game.close()

    def _time_is_up(self, goals: float) -> bool:
        """Whether an episode that has just ended did so for want of time, and not with a goal."""
        scenario = self._config.ScenarioConfig()
        if goals and scenario.end_episode_on_score:
            return False
        return bool(self._game.unwrapped.observation()[0]["steps_left"] <= 0)

    def _convert(self, observation: NDArray[Any]) -> NDArray[Any]:
        return observation != 0 if self._planes else observation.astype(np.float32)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make the scenario `target`, such as "academy_empty_goal_close".

    Raises:
      EnvError: no such scenario, or an option that cannot work.
    """
    check_choice(name, options, "representation", ("smm", "simple115v2"))
    check_choice(name, options, "smm_size", tuple(_SMM_SIZES))
    check_choice(name, options, "rewards", ("scoring", "scoring,checkpoints"))
    known = _scenarios()
    if target not in known:
        raise refuse_unknown("Football scenario", target, known)
    env: gymnasium.Env[Any, Any] = FootballEnv(target, options)
    if options["max_episode_steps"]:
        env = gymnasium.wrappers.TimeLimit(env, options["max_episode_steps"])
    return env


def _scenarios() -> list[str]:
    with _quiet():
        from gfootball import scenarios
    found = (module.name for module in pkgutil.iter_modules(scenarios.__path__))
    return [name for name in found if name not in ("tests", "test_example_multiagent")]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a window, and without what old gym writes about its age."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
