"""MinAtar games: Young & Tian 2019, arXiv:1903.03176. Binary planes of 10x10."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from env_wrappers.options import check_range
from env_wrappers.single import COMMON, refuse_unknown
from env_wrappers.spaces import binary_planes

# sticky_action_prob: the chance that the action before is repeated.
# difficulty_ramping: games get faster as they go on.
# minimal_actions: only the actions that do something in the game, instead of all six.
DEFAULTS: dict[str, Any] = {
    **COMMON,
    "sticky_action_prob": 0.1,
    "difficulty_ramping": True,
    "minimal_actions": True,
}

_GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
_FRAME_SCALE = 8
# One colour for each plane, of at most ten; the planes further back are drawn over.
_COLOURS = np.array(
    [
        *((0, 0, 0), (76, 114, 176), (221, 132, 82), (85, 168, 104), (196, 78, 82)),
        *((129, 114, 179), (147, 120, 96), (218, 139, 195), (140, 140, 140), (204, 185, 116)),
        (100, 181, 205),
    ],
    np.uint8,
)


class MinAtarEnv(gymnasium.Env[Any, Any]):
    """One game; observes `<bool>[10, 10, C]`.

    The package's own gymnasium environment isn't used, since it loads seaborn and matplotlib.
    """

    def __init__(self, game: str, options: Mapping[str, Any], render_mode: str | None):
        environment = _load_games()
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
        self.render_mode = render_mode
        self._game = environment(
            game,
            sticky_action_prob=options["sticky_action_prob"],
            difficulty_ramping=options["difficulty_ramping"],
        )
        minimal = options["minimal_actions"]
        self._actions = list(
            self._game.minimal_action_set() if minimal else range(self._game.num_actions())
        )
        self.action_space = gymnasium.spaces.Discrete(len(self._actions))
        shape = tuple(self._game.state_shape())
        self.observation_space = binary_planes(shape)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.bool_], dict[str, Any]]:
        """Start a game; the seed is of this one and those after it."""
        super().reset(seed=seed)
        if seed is not None:
            self._game.seed(seed)
        self._game.reset()
        return self._game.state(), {}

    def step(self, action: int) -> tuple[NDArray[np.bool_], float, bool, bool, dict[str, Any]]:
        """Act once."""
        reward, terminal = self._game.act(self._actions[action])
        return self._game.state(), float(reward), bool(terminal), False, {}

    def render(self) -> Any:
        """One colour per plane, `<uint8>[80, 80, 3]`."""
        state = self._game.state()
        plane = (state * (np.arange(state.shape[-1]) + 1)).max(-1)
        return _COLOURS[plane].repeat(_FRAME_SCALE, 0).repeat(_FRAME_SCALE, 1)


def make_env(
    name: str, target: str, options: Mapping[str, Any], render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Make the game `target`, such as "Breakout" or "space_invaders"; options: all of `DEFAULTS`.

    Raises:
      EnvError: no such game, or an option that cannot work.
    """
    check_range(name, options, "sticky_action_prob", 0.0, 1.0)
    games = {game.replace("_", ""): game for game in _GAMES}
    game = games.get(target.lower().replace("_", ""))
    if game is None:
        raise refuse_unknown("MinAtar game", target, [g.title().replace("_", "") for g in _GAMES])
    env: gymnasium.Env[Any, Any] = MinAtarEnv(game, options, render_mode)
    if options["max_episode_steps"]:
        env = gymnasium.wrappers.TimeLimit(env, options["max_episode_steps"])
    return env


def _load_games() -> Any:
    """The package's class of games, without matplotlib and seaborn, which only its window needs."""
    if "minatar.environment" not in sys.modules:
        hidden = {name: sys.modules.get(name) for name in ("matplotlib", "seaborn")}
        modules: dict[str, Any] = sys.modules
        modules.update(dict.fromkeys(hidden))
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            importlib.import_module("minatar.environment")
        finally:
            logging.disable(disabled)
            for name, module in hidden.items():
                del modules[name]
                if module is not None:
                    modules[name] = module
    return sys.modules["minatar.environment"].Environment
