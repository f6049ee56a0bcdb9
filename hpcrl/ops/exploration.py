"""Epsilon-greedy exploration: a ladder over the training environments, evaluation apart.

Source: Ape-X, Horgan et al. 2018, arXiv:1803.00933, section 4.1: environment i of N explores
with 0.4^(1 + 7 i / (N - 1)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BASE, FIRST_EXPONENT, LAST_EXPONENT = 0.4, 1.0, 8.0
"""Of the ladder; R2D2 uses the same."""


class Exploration(NamedTuple):
    """How each of N environments explores.

    Attributes:
      epsilon: `<float32>[N]`, probability of an action at random.
      evaluation: `<bool>[N]`, the environment only measures; nothing is learned from it.
    """

    epsilon: npt.NDArray[np.float32]
    evaluation: npt.NDArray[np.bool_]


def epsilon_ladder(num_envs: int) -> npt.NDArray[np.float32]:
    """Return epsilon of each of `num_envs` training environments, falling, `<float32>[N]`."""
    exponents = np.linspace(FIRST_EXPONENT, LAST_EXPONENT, num_envs)
    return (BASE**exponents).astype(np.float32)


def explore(
    env_ids: npt.NDArray[np.int64], num_envs: int, num_evaluation: int, evaluation_epsilon: float
) -> Exploration:
    """Return the exploration of some environments of a job.

    The evaluation environments are the last ids; the ladder is over the others alone.

    Args:
      env_ids: `<int64>[N]`, global ids.
      num_envs: environments of the whole job.
      num_evaluation: how many of them only measure.
      evaluation_epsilon: their epsilon.

    Raises:
      ValueError: no environment is left for training.
    """
    num_training = num_envs - num_evaluation
    if num_training < 1:
        raise ValueError(
            f"evaluation_envs {num_evaluation} leaves none of the {num_envs} environments for "
            "training"
        )
    epsilon = np.full(num_envs, evaluation_epsilon, np.float32)
    epsilon[:num_training] = epsilon_ladder(num_training)
    return Exploration(epsilon[env_ids], env_ids >= num_training)
