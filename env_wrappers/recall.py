"""`synthetic:recall`: a task that cannot be solved without memory.

The first observation of an episode shows one of `num_actions` cues; `delay` empty ones follow;
the last asks, and the action taken there gives the reward 1 if it is the cue's number, else 0.
The best return is 1, and chance is 1 / num_actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env_wrappers.actions import ActionCodec
from env_wrappers.batch import Arrays, EnvBatch, EpisodeTotals, StepBatch, env_spec, reset_batch
from env_wrappers.observations import ObservationCodec
from env_wrappers.options import check_range, resolve_options

# num_actions: cues, and as many answers.
# delay: empty observations between cue and question.
DEFAULTS: dict[str, Any] = {"num_actions": 4, "delay": 10}


class RecallBatch(EnvBatch):
    """Cue, delay, question. Observation: one-hot cue, then whether this is the question."""

    def __init__(self, name: str, seeds: Sequence[int], options: Mapping[str, Any]) -> None:
        """Make one environment for each seed; `options` are all of `DEFAULTS`, checked."""
        self.num_envs = len(seeds)
        self._num_cues = options["num_actions"]
        self._last_step = options["delay"] + 1
        self._rngs = [np.random.default_rng(seed) for seed in seeds]
        self._actions = ActionCodec(spaces.Discrete(self._num_cues), self.num_envs)
        space = spaces.Box(0.0, 1.0, (self._num_cues + 1,), np.float32)
        self.spec = env_spec(name, ObservationCodec(space).spec(1), self._actions.spec())
        self._cue = np.zeros(self.num_envs, np.int64)
        self._step = np.zeros(self.num_envs, np.int64)
        self._totals = EpisodeTotals(self.num_envs)

    def reset(self) -> StepBatch:
        """Start the next episode everywhere."""
        self._begin(np.ones(self.num_envs, np.bool_))
        self._totals.clear()
        return reset_batch(self._observe(), self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`."""
        self._actions.decode(actions)
        ended = self._step == self._last_step
        answer = actions[:, 0].astype(np.int64)
        reward = (ended & (answer == self._cue)).astype(np.float32)
        self._step += 1
        self._begin(ended)
        episode_return, episode_steps = self._totals.add(reward, ended)
        nowhere = np.zeros(self.num_envs, np.bool_)
        return StepBatch(
            observation=self._observe(),
            reward=reward,
            terminated=ended.copy(),
            truncated=nowhere,
            valid=np.ones(self.num_envs, np.bool_),
            restarted=nowhere.copy(),
            final_observation=None,
            ended=ended,
            episode_return=episode_return,
            episode_steps=episode_steps,
        )

    def _begin(self, rows: NDArray[np.bool_]) -> None:
        self._step[rows] = 0
        for row in np.flatnonzero(rows):
            self._cue[row] = self._rngs[row].integers(self._num_cues)

    def _observe(self) -> Arrays:
        vector = np.zeros((self.num_envs, self._num_cues + 1), np.float32)
        shown = np.flatnonzero(self._step == 0)
        vector[shown, self._cue[shown]] = 1.0
        vector[:, -1] = self._step == self._last_step
        return {"obs": vector}


def make(name: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]) -> EnvBatch:
    """Make the environments; options as in `DEFAULTS`.

    Raises:
      EnvError: an option that cannot work.
    """
    resolved = resolve_options(name, options, DEFAULTS)
    check_range(name, resolved, "num_actions", 2)
    check_range(name, resolved, "delay", 0)
    return RecallBatch(name, seeds[:num_envs], resolved)
