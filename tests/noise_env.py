"""An environment whose return tells every action, and whose episodes end in both ways."""

from typing import Any

import gymnasium
import numpy as np


class NoiseEnv(gymnasium.Env[Any, Any]):
    """Observes noise; the action picks which of its numbers is the reward."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def _observe(self) -> Any:
        self._noise = self.np_random.normal(size=3).astype(np.float32)
        return self._noise

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self._noise[action])
        chance = self.np_random.uniform()
        return self._observe(), reward, chance < 0.1, 0.1 < chance < 0.2, {}
