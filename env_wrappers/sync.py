"""A batch of single gymnasium environments, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from numpy.typing import NDArray

from env_wrappers.actions import ActionCodec
from env_wrappers.batch import (
    Arrays,
    EnvBatch,
    EpisodeTotals,
    StepBatch,
    as_rewards,
    env_spec,
    reset_batch,
)
from env_wrappers.errors import EnvError
from env_wrappers.observations import ObservationCodec


class SyncBatch(EnvBatch):
    """E single environments; each is reset on the step that ends its episode.

    The environments' info dicts are ignored. An exception in an environment propagates. A limit of
    time that gymnasium keeps around an environment is kept here, for all rows at once.
    """

    def __init__(
        self,
        name: str,
        envs: Sequence[gymnasium.Env[Any, Any]],
        seeds: Sequence[int],
        frame_stack: int = 1,
    ) -> None:
        """Take over `envs`, all of the same spaces.

        Args:
          name: full name for the spec and for messages.
          envs: the environments, one for each seed.
          seeds: used by the first reset; later episodes continue the random streams.
          frame_stack: time steps that the network is to see stacked in box leaves.

        Raises:
          EnvError: a space that cannot travel, or environments of different spaces.
        """
        self.num_envs = len(envs)
        self._name = name
        peeled = [_without_limit(env) for env in envs]
        self._envs = [env for env, _ in peeled]
        self._limit_steps = np.array([limit for _, limit in peeled], np.int32)
        self._seeds: Sequence[int | None] = list(seeds)
        first = self._envs[0]
        for row, env in enumerate(self._envs):
            if (
                env.observation_space != first.observation_space
                or env.action_space != first.action_space
            ):
                raise EnvError(f"{name}: environment {row} has other spaces than environment 0")
        self._observations = ObservationCodec(first.observation_space)
        self._actions = ActionCodec(first.action_space, self.num_envs)
        self.spec = env_spec(name, self._observations.spec(frame_stack), self._actions.spec())
        self._totals = EpisodeTotals(self.num_envs)

    def reset(self) -> StepBatch:
        """Start an episode everywhere; only the first call uses the seeds."""
        raw = self._observations.new_raw(self.num_envs)
        write = self._observations.writer(raw)
        for row, (env, seed) in enumerate(zip(self._envs, self._seeds, strict=True)):
            first, _ = env.reset(seed=seed)
            write(row, first)
        observation = self._observations.travelling(raw)
        self._seeds = [None] * self.num_envs
        self._observations.check_bounds(observation)
        self._totals.clear()
        return reset_batch(observation, self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`."""
        decoded = self._actions.decode_rows(actions)
        # Copied at once, as environments may share what they observe into.
        raw = self._observations.new_raw(self.num_envs)
        write = self._observations.writer(raw)
        final: Arrays | None = None
        rewards = []
        flags = np.zeros((2, self.num_envs), np.bool_)
        terminated, truncated = flags
        last = (self._totals.steps + 1 == self._limit_steps).tolist()
        for row, (env, action, is_last) in enumerate(zip(self._envs, decoded, last, strict=True)):
            newest, reward, is_terminal, is_cut, _ = env.step(action)
            rewards.append(reward)
            if is_terminal or is_cut or is_last:
                terminated[row] = is_terminal
                if not is_terminal:
                    truncated[row] = True
                    if final is None:
                        final = self._observations.new_arrays(self.num_envs)
                    self._observations.write_row(final, row, newest)
                newest, _ = env.reset()
            write(row, newest)
        observation = self._observations.travelling(raw)
        ended = terminated | truncated
        if ended.any():
            self._observations.check_bounds({k: leaf[ended] for k, leaf in observation.items()})
        reward = as_rewards(self._name, rewards, self.num_envs)
        episode_return, episode_steps = self._totals.add(reward, ended)
        return StepBatch(
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(self.num_envs, np.bool_),
            restarted=np.zeros(self.num_envs, np.bool_),
            final_observation=final,
            ended=ended,
            episode_return=episode_return,
            episode_steps=episode_steps,
        )

    def check(self, step: StepBatch) -> None:
        """Raise EnvError unless all observations are in their space."""
        self._observations.check_bounds(step.observation)
        if step.final_observation is not None:
            cut = step.truncated
            self._observations.check_bounds(
                {path: leaf[cut] for path, leaf in step.final_observation.items()}
            )

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()


def _without_limit(env: gymnasium.Env[Any, Any]) -> tuple[gymnasium.Env[Any, Any], int]:
    """`env` without the outer wrappers whose work a batch does, and its limit of steps or 0.

    These are the limit of time, and the check that a reset comes before steps.
    """
    limit_steps = 0
    while type(env) is TimeLimit or type(env) is OrderEnforcing:
        if type(env) is TimeLimit:
            steps: int = env._max_episode_steps
            limit_steps = min(limit_steps or steps, steps)
        env = env.env
    return env, limit_steps
