"""Whole episodes for evaluation: what is played, for how long, and by which policy.

`hpcrl eval` and evaluator ranks play by these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from env_wrappers import EnvBatch, StepBatch
from hpcrl.acting.policy import Decided, Policy
from hpcrl.comm.slots import Rows
from hpcrl.config.sections import EnvConfig
from hpcrl.specs import EnvSpec

if TYPE_CHECKING:
    from hpcrl.recording import Recorder

_WHOLE_EPISODES: Mapping[str, Mapping[str, Any]] = {"atari": {"life_loss": False}}
"""By environment family, options that only serve training, with their value in evaluation."""


class Episode(NamedTuple):
    """One episode: its undiscounted, unclipped return, its agent steps, and whether they are all.

    One that was cut off had reached the largest number of steps; the return is that so far.
    """

    episode_return: float
    agent_steps: int
    cut_off: bool = False


def evaluation_options(env: EnvConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the environment's options for whole episodes, and what was changed for that."""
    options = dict(env.options)
    notes = []
    for key, value in _WHOLE_EPISODES.get(env.name.partition(":")[0], {}).items():
        if options.get(key, value) != value:
            notes.append(
                f"env.options.{key} {options[key]} only serves training: played with {value}"
            )
        options[key] = value
    return options, notes


def episode_quota(episodes: int, envs: int) -> list[int]:
    """Return how many of `episodes` each of at most `envs` environments plays, at least 1."""
    count = min(envs, episodes)
    return [episodes // count + (index < episodes % count) for index in range(count)]


class RecordingPolicy(Policy):
    """A policy whose rows also go to a recorder, set after construction."""

    recorder: Recorder | None = None

    def _keep(self, decided: Decided, behaviour: dict[str, torch.Tensor]) -> None:
        if self.recorder is None:
            return
        for name, value in behaviour.items():
            decided.fields[f"behaviour:{name}"] = value.cpu().numpy()
        self.recorder.add(decided.ids, decided.fields)

    def end(self, row: int, step: StepBatch) -> None:
        """Tell the recorder how the last episode of `row` ended; it is not played on."""
        if self.recorder is None:
            return
        final = None
        if not step.terminated[row]:
            seen = step.final_observation if step.truncated[row] else step.observation
            final = {path: leaf[row] for path, leaf in (seen or step.observation).items()}
        self.recorder.end(row, float(step.reward[row]), final)


class EpisodePlayer:
    """Plays rounds of whole episodes in E environments.

    Args:
      envs: the environments, fresh.
      policy: with a row of state for each of them.
      max_steps: agent steps after which an episode is cut off, at least 1. A greedy policy can
        go in circles for ever.
    """

    def __init__(self, envs: EnvBatch, policy: RecordingPolicy, max_steps: int):
        self._envs = envs
        self._policy = policy
        self._max_steps = max_steps
        self._run_id = np.full(envs.num_envs, -1, np.int64)
        action = EnvSpec.from_json(envs.spec).action
        # Environments that are done repeat their last action, which is a possible one.
        self._actions = np.zeros((envs.num_envs, action.size), action.dtype)
        self._return = np.zeros(envs.num_envs, np.float64)
        self._steps = np.zeros(envs.num_envs, np.int64)

    def play(
        self,
        quota: Sequence[int],
        on_episode: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[list[Episode]] | None:
        """Play until environment i has finished `quota[i]` episodes, all from their beginning.

        An environment whose episode was cut off starts its next one when all of them can.

        Args:
          quota: episodes of each environment.
          on_episode: called after each episode that counts.
          stopped: called before each step; true ends the round.

        Returns:
          The episodes of each environment; None if it was stopped.
        """
        played: list[list[Episode]] = [[] for _ in quota]
        left = np.array(quota)
        waiting = np.zeros(len(quota), bool)
        step = self._reset()
        while left.any():
            if stopped():
                return None
            playing = (left > 0) & ~waiting
            if not playing.any():
                step = self._reset()
                waiting[:] = False
                playing = left > 0
            step = self._step(step, playing)
            over = step.valid & playing
            cut = over & ~step.ended & (self._steps >= self._max_steps)
            for row in np.flatnonzero(over & (step.ended | cut)).tolist():
                played[row].append(self._episode(row, step, bool(cut[row])))
                left[row] -= 1
                on_episode()
                if not left[row] or cut[row]:
                    self._policy.end(row, step)
            waiting |= cut
        return played

    def _reset(self) -> StepBatch:
        self._run_id += 1
        self._return[:] = 0.0
        self._steps[:] = 0
        return self._envs.reset()

    def _step(self, step: StepBatch, playing: npt.NDArray[np.bool_]) -> StepBatch:
        self._run_id += step.restarted
        live = np.flatnonzero(step.valid & playing)
        self._actions[live] = self._policy.act(rows_of(step, live, self._run_id))
        self._steps[live] += 1
        given = self._envs.step(self._actions)
        self._return[live] += given.reward[live]
        self._return[given.restarted] = 0.0
        self._steps[given.restarted] = 0
        return given

    def _episode(self, row: int, step: StepBatch, cut_off: bool) -> Episode:
        total, steps = float(self._return[row]), int(self._steps[row])
        self._return[row], self._steps[row] = 0.0, 0
        if cut_off:
            return Episode(total, steps, True)
        return Episode(float(step.episode_return[row]), int(step.episode_steps[row]))


def rows_of(step: StepBatch, ids: npt.NDArray[np.intp], run_id: npt.NDArray[np.int64]) -> Rows:
    """Return rows `ids` of what environments gave, as they wait for actions.

    Args:
      step: what they gave.
      ids: `<intp>[n]`.
      run_id: `<int64>[E]`, of all environments.
    """
    final = step.final_observation
    return Rows(
        ids=ids,
        run_id=run_id[ids],
        observation={path: leaf[ids] for path, leaf in step.observation.items()},
        reward=step.reward[ids],
        terminated=step.terminated[ids],
        truncated=step.truncated[ids],
        final_observation=None if final is None else {p: leaf[ids] for p, leaf in final.items()},
    )
