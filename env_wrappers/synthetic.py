"""Environments made of arithmetic, for tests of time semantics and for benchmarks.

`synthetic:counting` tells in each observation where it is, so that a test can say which step of
which episode every row must hold. All of the batch is computed at once, without a Python loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env_wrappers import recall
from env_wrappers.actions import ActionCodec
from env_wrappers.batch import Arrays, EnvBatch, EpisodeTotals, StepBatch, env_spec, reset_batch
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.observations import ObservationCodec
from env_wrappers.options import check_choice, check_range, resolve_options

# episode_length: agent steps of an episode.
# length_spread: the episodes of an environment are longer by its seed modulo (this + 1).
# truncate: episodes end by truncation instead of termination.
# step_time_s: time that each environment takes for a step; a batch takes E times as long.
# step_time_mode: "sleep" leaves the core to others, "compute" keeps it busy for that CPU time.
# observation_shape: empty for the vector (seed, episode, step) in float32; otherwise an array
#   of that shape, all of it the step index (modulo 256 for uint8).
# observation_dtype: of an array of a given shape, "uint8" or "float32".
# frame_stack: time steps that the network sees stacked.
# num_actions: categories of the action, which has no effect.
# action_size: if above 0, the action is a vector of this many numbers from -1 to 1 instead.
DEFAULTS: dict[str, Any] = {
    "episode_length": 10,
    "length_spread": 0,
    "truncate": False,
    "step_time_s": 0.0,
    "step_time_mode": "sleep",
    "observation_shape": (),
    "observation_dtype": "uint8",
    "frame_stack": 1,
    "num_actions": 4,
    "action_size": 0,
}


class CountingBatch(EnvBatch):
    """Deterministic environments that count.

    Step k of an episode is observed as k (from 0); the action taken there gives the reward
    k + 1, so the reward always equals the step index that it leads to, and an episode of L
    steps has the return L (L + 1) / 2. Episodes are counted from 0; the seed is told modulo
    2^24, which float32 holds exactly.
    """

    def __init__(self, name: str, seeds: Sequence[int], options: Mapping[str, Any]) -> None:
        """Make one environment for each seed; `options` are all of `DEFAULTS`, checked."""
        self.num_envs = len(seeds)
        self._identity = np.array([seed % 2**24 for seed in seeds], np.float32)
        spread = options["length_spread"] + 1
        self._length = np.array(
            [options["episode_length"] + seed % spread for seed in seeds], np.int64
        )
        self._truncate = options["truncate"]
        self._step_time_s = options["step_time_s"] * self.num_envs
        self._wait = _compute if options["step_time_mode"] == "compute" else time.sleep
        self._shape = tuple(options["observation_shape"])
        self._dtype = np.dtype(options["observation_dtype"] if self._shape else np.float32)
        action_space: spaces.Space[Any] = spaces.Discrete(options["num_actions"])
        if options["action_size"]:
            action_space = spaces.Box(-1.0, 1.0, (options["action_size"],))
        self._actions = ActionCodec(action_space, self.num_envs)
        high = 255 if self._dtype == np.uint8 else np.inf
        space = spaces.Box(0, high, self._shape or (3,), self._dtype.type)
        observation = ObservationCodec(space).spec(options["frame_stack"])
        self.spec = env_spec(name, observation, self._actions.spec())
        self._episode = np.full(self.num_envs, -1, np.int64)
        self._step = np.zeros(self.num_envs, np.int64)
        self._totals = EpisodeTotals(self.num_envs)

    def reset(self) -> StepBatch:
        """Start the next episode everywhere."""
        self._episode += 1
        self._step[:] = 0
        self._totals.clear()
        return reset_batch(self._observe(), self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`."""
        self._actions.decode(actions)
        if self._step_time_s > 0.0:
            self._wait(self._step_time_s)
        self._step += 1
        reward = self._step.astype(np.float32)
        ended = self._step >= self._length
        nowhere = np.zeros(self.num_envs, np.bool_)
        final = None
        if ended.any():
            final = self._observe() if self._truncate else None
            self._episode[ended] += 1
            self._step[ended] = 0
        episode_return, episode_steps = self._totals.add(reward, ended)
        return StepBatch(
            observation=self._observe(),
            reward=reward,
            terminated=nowhere if self._truncate else ended.copy(),
            truncated=ended.copy() if self._truncate else nowhere,
            valid=np.ones(self.num_envs, np.bool_),
            restarted=np.zeros(self.num_envs, np.bool_),
            final_observation=final,
            ended=ended,
            episode_return=episode_return,
            episode_steps=episode_steps,
        )

    def _observe(self) -> Arrays:
        if not self._shape:
            vector = np.stack([self._identity, self._episode, self._step], axis=1)
            return {"obs": vector.astype(np.float32)}
        frames = np.empty((self.num_envs, *self._shape), self._dtype)
        frames[...] = self._step.astype(self._dtype).reshape(-1, *[1] * len(self._shape))
        return {"obs": frames}


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make `target`: "counting", with options as in `DEFAULTS`, or "recall".

    Raises:
      EnvError: no such environment, or an option that cannot work.
    """
    if target == "recall":
        return recall.make(name, num_envs, seeds, options)
    if target != "counting":
        hint = suggestion(target, ["counting", "recall"]) or "; there are: counting, recall"
        raise EnvError(f"there is no synthetic environment {target!r}{hint}")
    resolved = resolve_options(name, options, DEFAULTS)
    for key in ("episode_length", "frame_stack", "num_actions"):
        check_range(name, resolved, key, 1)
    for key in ("length_spread", "step_time_s", "action_size"):
        check_range(name, resolved, key, 0)
    check_choice(name, resolved, "step_time_mode", ("sleep", "compute"))
    check_choice(name, resolved, "observation_dtype", ("uint8", "float32"))
    shape = resolved["observation_shape"]
    if not all(isinstance(length, int) and length > 0 for length in shape):
        raise EnvError(f"{name}: option observation_shape must be positive lengths, got {shape}")
    return CountingBatch(name, seeds, resolved)


def _compute(duration_s: float) -> None:
    """Keep this thread busy for a CPU time; time in which others have the core doesn't count."""
    end = time.thread_time() + duration_s
    while time.thread_time() < end:
        pass
