"""The interface that all environments are brought to: a batch that steps and resets itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from env_wrappers.errors import EnvError

Arrays = dict[str, NDArray[Any]]
"""Observation leaves by path, each `[E, ...]`."""


FAILURE_KINDS = ("raised", "garbage", "hung", "died")
"""How environments fail: an exception, what can't be a step, no answer, a dead process."""


class StepBatch(NamedTuple):
    """What E environments give after a reset or a step; the arrays belong to the caller.

    Every environment restarts itself on the step that ends its episode: on such a row
    `observation` is already the first of the next episode, while `reward`, `terminated` and
    `truncated` belong to the action just taken. An environment that can only restart with an
    extra step gives a row with `valid` false first (the row and the action for it are to be
    ignored), and on the next step the row as described.

    Attributes:
      observation: leaves by path, `[E, ...]`.
      reward: `<float32>[E]`, not clipped.
      terminated: `<bool>[E]`, the episode for learning ended in a terminal state.
      truncated: `<bool>[E]`, it was cut off; never true where `terminated` is.
      valid: `<bool>[E]`, false where nothing is to be learned or answered yet.
      restarted: `<bool>[E]`, the environment failed and was made anew; its row is a reset.
      final_observation: the leaves `[E, ...]` that the cut-off episodes ended with, meaningful
        only where `truncated`; None where no row is.
      ended: `<bool>[E]`, a whole episode, as it is reported, ended.
      episode_return: `<float32>[E]`, sum of its rewards, meaningful where `ended`.
      episode_steps: `<int32>[E]`, its agent steps, meaningful where `ended`.
    """

    observation: Arrays
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    restarted: NDArray[np.bool_]
    final_observation: Arrays | None
    ended: NDArray[np.bool_]
    episode_return: NDArray[np.float32]
    episode_steps: NDArray[np.int32]


class EnvBatch(ABC):
    """E environments of one kind, stepped together.

    Attributes:
      spec: JSON-able description: `name`, `observation` (leaves by path), `action` (parts of
        the flat action vector) and `frame_skip` (emulator frames per agent step).
      num_envs: E.
    """

    spec: dict[str, Any]
    num_envs: int

    @abstractmethod
    def reset(self) -> StepBatch:
        """Start an episode everywhere; only the first call uses the seeds.

        Raises:
          EnvError: an observation doesn't match its declared space.
        """

    @abstractmethod
    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere.

        Args:
          actions: `<int32|float32>[E, A]`, the flat action vectors.

        Raises:
          EnvError: an action, observation or reward that is out of its space, NaN or infinite.
        """

    @property
    def failures(self) -> dict[str, int]:
        """Failures so far after which all of these environments were made anew, by kind."""
        return dict.fromkeys(FAILURE_KINDS, 0)

    def check(self, step: StepBatch) -> None:  # noqa: B027 (most can't give anything else)
        """Look whether all observations of `step`, as this batch gave it, are in their space.

        `step` itself looks at an episode's first ones only, since that costs less.

        Raises:
          EnvError: one is not.
        """

    def close(self) -> None:  # noqa: B027 (most environments hold nothing)
        """Release the environments; the batch is not used afterwards."""


class EpisodeTotals:
    """Return and agent steps of the running episode of each environment.

    Attributes:
      steps: `<int32>[E]`, agent steps of the running episode so far.
    """

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs, np.float64)
        self.steps = np.zeros(num_envs, np.int32)

    def clear(self) -> None:
        """Forget the running episodes."""
        self._return[:] = 0.0
        self.steps[:] = 0

    def add(
        self, reward: NDArray[np.float32], ended: NDArray[np.bool_], counted: Any = True
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Add one step and start anew where an episode ended.

        Args:
          reward: `<float32>[E]`, zero where not `counted`.
          ended: `<bool>[E]`.
          counted: `<bool>[E]` or True, the rows that took a real step.

        Returns:
          `<float32>[E]` returns and `<int32>[E]` steps, this step included.
        """
        self._return += reward
        self.steps += counted
        totals = self._return.astype(np.float32), self.steps.copy()
        self._return[ended] = 0.0
        self.steps[ended] = 0
        return totals


def env_spec(
    name: str, observation: dict[str, Any], action: dict[str, Any], frame_skip: int = 1
) -> dict[str, Any]:
    """`EnvBatch.spec` from the codecs' descriptions and the emulator frames per agent step."""
    return {"name": name, "observation": observation, "action": action, "frame_skip": frame_skip}


def reset_batch(observation: Arrays, num_envs: int) -> StepBatch:
    """The StepBatch that follows a reset of all environments."""
    flags = np.zeros((4, num_envs), np.bool_)
    return StepBatch(
        observation=observation,
        reward=np.zeros(num_envs, np.float32),
        terminated=flags[0],
        truncated=flags[1],
        valid=np.ones(num_envs, np.bool_),
        restarted=flags[2],
        final_observation=None,
        ended=flags[3],
        episode_return=np.zeros(num_envs, np.float32),
        episode_steps=np.zeros(num_envs, np.int32),
    )


def as_rewards(name: str, reward: Any, num_envs: int) -> NDArray[np.float32]:
    """`reward` as `<float32>[E]` of its own memory.

    Raises:
      EnvError: wrong shape, or NaN or infinite for some environment.
    """
    try:
        rewards = np.array(reward, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise EnvError(f"{name}: reward {reward!r} is no number: {error}") from None
    if rewards.shape != (num_envs,):
        raise EnvError(f"{name}: reward has shape {rewards.shape}, expected ({num_envs},)")
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise EnvError(f"{name}: reward of environment {row} is {rewards[row]}")
    return rewards
