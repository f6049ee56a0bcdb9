"""A pole on a cart as an external simulator, in Python without numpy.

The equations are those of Barto, Sutton and Anderson (1983), as in Gymnasium's CartPole.
"""

from __future__ import annotations

import array
import math
import random
import sys

from env_wrappers.simulator_client import serve

SPACES = {
    "observation": {"shape": [4], "dtype": "float32", "low": -1e6, "high": 1e6},
    "action": {"discrete": 2},
}


class Pole:
    """Balance for 500 steps of 20 ms; each gives the reward 1."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._state = [0.0] * 4
        self._steps = 0

    def reset(self, seed: int) -> bytes:
        """Begin an episode; seed 0 goes on with the random numbers of before."""
        if seed:
            self._random.seed(seed)
        self._state = [self._random.uniform(-0.05, 0.05) for _ in range(4)]
        self._steps = 0
        return self._observe()

    def step(self, action: bytes) -> tuple[bytes, float, bool, bool]:
        """Push to the left (0) or to the right (1)."""
        x, x_dot, theta, theta_dot = self._state
        force = 10.0 if array.array("i", action)[0] else -10.0
        sine, cosine = math.sin(theta), math.cos(theta)
        push = (force + 0.05 * theta_dot**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        move = push - 0.05 * turn * cosine / 1.1
        self._state = [
            x + 0.02 * x_dot,
            x_dot + 0.02 * move,
            theta + 0.02 * theta_dot,
            theta_dot + 0.02 * turn,
        ]
        self._steps += 1
        fallen = abs(self._state[0]) > 2.4 or abs(self._state[2]) > math.radians(12)
        return self._observe(), 1.0, fallen, self._steps == 500

    def _observe(self) -> bytes:
        values = array.array("f", self._state)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()


if __name__ == "__main__":
    serve(SPACES, Pole())
