"""A rod to be heated into a given shape: an environment that is an MPI program over P ranks.

An example of `env.ranks_per_env`, and small enough to learn in minutes. The rod has temperature u
on [0, 1], zero at both ends, and four heaters: u_t = nu u_xx + sum_k a_k g_k(x). Each rank holds a
stretch of it and exchanges its ends with its neighbours. Every episode asks for another shape.

It imports no MPI: the communicator that it is given has all it needs.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

CELLS = 32
SENSORS = 16
HEATERS = 4
EPISODE_STEPS = 40

_DIFFUSIVITY = 0.05
_HEATER_POWER = 4.0
_HEATER_WIDTH = 0.12
_STEP_S = 0.05
_SUBSTEPS = 8


class HeatRod(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """One rank's stretch of the rod.

    The observation `<float32>[32]` holds the temperature and the wanted one at 16 sensors, the same
    on every rank. The reward of a step is 1/40 of 1 - error / error of a cold rod, both the
    mean square over the rod, so doing nothing gives at most 0 and a perfect episode 1.

    Args:
      communicator: of the ranks that share the rod; their number divides 16.

    Raises:
      ValueError: it doesn't.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2 * SENSORS,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (HEATERS,), np.float32)

    def __init__(self, communicator: Any) -> None:
        rank, size = communicator.Get_rank(), communicator.Get_size()
        if SENSORS % size:
            raise ValueError(f"{size} ranks can't share {SENSORS} sensors: give 1, 2, 4, 8 or 16")
        self._communicator = communicator
        self._left = rank - 1 if rank else None
        self._right = rank + 1 if rank + 1 < size else None
        cells = CELLS // size
        self._x = (np.arange(rank * cells, (rank + 1) * cells) + 1.0) / (CELLS + 1)
        centres = (np.arange(HEATERS) + 0.5) / HEATERS
        distance = (self._x[None] - centres[:, None]) / _HEATER_WIDTH
        self._heaters = _HEATER_POWER * np.exp(-0.5 * distance**2)
        # With one cell more on each side, which belongs to the neighbours.
        self._u = np.zeros(cells + 2)
        self._target = np.zeros(cells)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start from a cold rod and ask for another shape; the same seed gives the same one."""
        super().reset(seed=seed)
        first, second = self.np_random.uniform([0.5, -0.5], [1.0, 0.5])
        self._target = first * np.sin(np.pi * self._x) + second * np.sin(2 * np.pi * self._x)
        self._u[:] = 0.0
        self._steps = 0
        return self._observe(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Heat for a while."""
        source = np.clip(action, -1.0, 1.0).astype(np.float64) @ self._heaters
        step_s = _STEP_S / _SUBSTEPS
        for _ in range(_SUBSTEPS):
            self._exchange_ends()
            u = self._u
            curvature = (u[2:] - 2 * u[1:-1] + u[:-2]) * (CELLS + 1) ** 2
            u[1:-1] += step_s * (_DIFFUSIVITY * curvature + source)
        self._steps += 1
        error, cold = self._sum_over_ranks(
            np.sum((self._u[1:-1] - self._target) ** 2), np.sum(self._target**2)
        )
        reward = (1.0 - error / cold) / EPISODE_STEPS
        return self._observe(), float(reward), False, self._steps >= EPISODE_STEPS, {}

    def _exchange_ends(self) -> None:
        """Get the neighbours' nearest cells."""
        u, messages = self._u, []
        for neighbour, mine, theirs in ((self._left, 1, 0), (self._right, -2, -1)):
            if neighbour is not None:
                messages.append(self._communicator.Irecv(_cell(u, theirs), neighbour))
                messages.append(self._communicator.Isend(_cell(u, mine), neighbour))
        for message in messages:
            message.Wait()

    def _sum_over_ranks(self, *values: float) -> NDArray[np.float64]:
        parts = np.array(values)
        gathered = np.empty((self._communicator.Get_size(), len(parts)))
        self._communicator.Allgather(parts, gathered)
        total: NDArray[np.float64] = gathered.sum(0)
        return total

    def _observe(self) -> NDArray[np.float32]:
        size = self._communicator.Get_size()
        sensors = np.stack([self._u[1:-1], self._target]).reshape(2, SENSORS // size, -1).mean(2)
        gathered = np.empty((size, *sensors.shape))
        self._communicator.Allgather(sensors, gathered)
        return np.moveaxis(gathered, 0, 1).reshape(-1).astype(np.float32)


def make(communicator: Any) -> HeatRod:
    """Make this rank's stretch of a rod: `--env.name env_wrappers.heat_rod:make`."""
    return HeatRod(communicator)


def _cell(u: NDArray[np.float64], index: int) -> NDArray[np.float64]:
    index %= len(u)
    return u[index : index + 1]
