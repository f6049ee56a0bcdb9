"""A gymnasium vector environment of any autoreset mode, brought to the order of `StepBatch`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
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
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.observations import ObservationCodec

Flags = NDArray[np.bool_]
_Normalise = Callable[[Any, NDArray[np.float32], Flags, Flags, dict[str, Any]], StepBatch]


class VectorBatch(EnvBatch):
    """A vector environment that resets its own environments, in any of gymnasium's modes.

    - SAME_STEP gives the reset observation with the last reward, and the final observation
      in `info["final_obs"]`. Only the rows of environments that are done are read there.
    - NEXT_STEP gives the final observation with the last reward, and the reset observation one
      step later, ignoring the action. The results are held back until then, and the first of
      the two rows is marked not valid. What the reset step reports as reward is dropped.
    - DISABLED leaves the reset to us: it follows at once, by `options["reset_mask"]`.
    """

    def __init__(
        self,
        name: str,
        envs: VectorEnv[Any, Any, Any],
        seeds: Sequence[int] | None,
        mode: str = "",
        frame_stack: int = 1,
    ) -> None:
        """Take over `envs`.

        Args:
          name: full name for the spec and for messages.
          envs: the vector environment.
          seeds: used by the first reset. A vector environment other than gymnasium's own two
            takes one number, which is then made from all of them. None: it has its seeds.
          mode: autoreset mode, such as "SAME_STEP", for an environment that declares none in
            its `metadata["autoreset_mode"]`, or a wrong one.
          frame_stack: time steps that the network is to see stacked in box leaves.

        Raises:
          EnvError: a space that cannot travel, or an unknown autoreset mode.
        """
        self.num_envs = envs.num_envs
        self._name = name
        self._envs = envs
        self._seed: Any = None if seeds is None else _reset_seed(envs, seeds)
        self._observations = ObservationCodec(envs.single_observation_space)
        self._actions = ActionCodec(envs.single_action_space, self.num_envs)
        self.spec = env_spec(name, self._observations.spec(frame_stack), self._actions.spec())
        self._totals = EpisodeTotals(self.num_envs)
        # The row's environment is done, but its reset comes with the next step (NEXT_STEP).
        self._pending = np.zeros(self.num_envs, np.bool_)
        self._held = reset_batch({}, self.num_envs)
        normalise: dict[AutoresetMode, _Normalise] = {
            AutoresetMode.SAME_STEP: self._same_step,
            AutoresetMode.NEXT_STEP: self._next_step,
            AutoresetMode.DISABLED: self._disabled,
        }
        self._normalise = normalise[_autoreset_mode(name, envs, mode)]

    def reset(self) -> StepBatch:
        """Start an episode everywhere; only the first call uses the seeds."""
        raw, _ = self._envs.reset(seed=self._seed)
        self._seed = None
        observation = self._observations.encode(raw, self.num_envs)
        self._observations.check_bounds(observation)
        self._totals.clear()
        self._pending = np.zeros(self.num_envs, np.bool_)
        return reset_batch(observation, self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`."""
        raw, reward, terminated, truncated, info = self._envs.step(self._actions.decode(actions))
        terminated = np.array(terminated, np.bool_)
        truncated = np.asarray(truncated, np.bool_) & ~terminated
        return self._normalise(
            raw, as_rewards(self._name, reward, self.num_envs), terminated, truncated, info
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
        """Close the vector environment."""
        self._envs.close()

    def _same_step(
        self,
        raw: Any,
        reward: NDArray[np.float32],
        terminated: Flags,
        truncated: Flags,
        info: dict[str, Any],
    ) -> StepBatch:
        observation = self._observations.encode(raw, self.num_envs)
        final = None
        if truncated.any():
            final = self._final_from_info(info.get("final_obs"), truncated)
            if final is None:
                terminated = terminated | truncated
                truncated = np.zeros(self.num_envs, np.bool_)
        return self._finish(observation, reward, terminated, truncated, final)

    def _final_from_info(self, raw: Any, truncated: Flags) -> Arrays | None:
        """The final observations of the cut-off rows; None where the environment has none."""
        if raw is None:
            warnings.warn(
                f"{self._name} cuts episodes off without giving their final observation: "
                "they count as terminated, and nothing is bootstrapped from them",
                stacklevel=2,
            )
            return None
        if not (isinstance(raw, np.ndarray) and raw.dtype == np.object_):
            return self._observations.encode(raw, self.num_envs, truncated)
        final = self._observations.new_arrays(self.num_envs)
        for row in np.flatnonzero(truncated).tolist():
            self._observations.write_row(final, row, raw[row])
        return final

    def _disabled(
        self,
        raw: Any,
        reward: NDArray[np.float32],
        terminated: Flags,
        truncated: Flags,
        info: dict[str, Any],
    ) -> StepBatch:
        observation = self._observations.encode(raw, self.num_envs)
        final = None
        done = terminated | truncated
        if done.any():
            final = observation if truncated.any() else None
            raw, _ = self._envs.reset(options={"reset_mask": done.copy()})
            restarted = self._observations.encode(raw, self.num_envs)
            observation = {
                path: np.where(done.reshape(-1, *[1] * (leaf.ndim - 1)), restarted[path], leaf)
                for path, leaf in observation.items()
            }
        return self._finish(observation, reward, terminated, truncated, final)

    def _next_step(
        self,
        raw: Any,
        reward: NDArray[np.float32],
        terminated: Flags,
        truncated: Flags,
        info: dict[str, Any],
    ) -> StepBatch:
        observation = self._observations.encode(raw, self.num_envs)
        resetting, held = self._pending, self._held
        reward[resetting] = 0.0
        terminated &= ~resetting
        truncated &= ~resetting
        final = (
            {path: leaf.copy() for path, leaf in observation.items()} if truncated.any() else None
        )
        step = self._finish(observation, reward, terminated, truncated, final, resetting)
        done = step.ended
        # A row that resets now was done on the step just before, so one step back is enough.
        self._pending, self._held = done, step

        def shown(now: NDArray[Any], then: NDArray[Any]) -> NDArray[Any]:
            return np.where(resetting, then, now * ~done)

        shown_cut = shown(truncated, held.truncated)
        return step._replace(
            reward=shown(reward, held.reward),
            terminated=shown(terminated, held.terminated),
            truncated=shown_cut,
            valid=~done,
            final_observation=held.final_observation if shown_cut.any() else None,
            ended=shown(done, held.ended),
            episode_return=shown(step.episode_return, held.episode_return),
            episode_steps=shown(step.episode_steps, held.episode_steps),
        )

    def _finish(
        self,
        observation: Arrays,
        reward: NDArray[np.float32],
        terminated: Flags,
        truncated: Flags,
        final: Arrays | None,
        resetting: Flags | None = None,
    ) -> StepBatch:
        """Count the step and put the batch together.

        The rows that hold an episode's first observation are those `resetting`, which took no
        step of their own; without it they are the rows whose episode ended.
        """
        ended = terminated | truncated
        first, counted = (ended, True) if resetting is None else (resetting, ~resetting)
        if first.any():
            self._observations.check_bounds({k: leaf[first] for k, leaf in observation.items()})
        episode_return, episode_steps = self._totals.add(reward, ended, counted=counted)
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


def _reset_seed(envs: VectorEnv[Any, Any, Any], seeds: Sequence[int]) -> Any:
    """What `envs.reset` takes as its seed for one seed per environment."""
    if isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
        return list(seeds)
    return int(np.random.SeedSequence(list(seeds)).generate_state(1)[0] >> 1)


def _autoreset_mode(name: str, envs: VectorEnv[Any, Any, Any], given: str) -> AutoresetMode:
    """The mode that the user gave, else the one the environment declares."""
    if given:
        try:
            return AutoresetMode[given.upper()]
        except KeyError:
            modes = [mode.name for mode in AutoresetMode]
            raise EnvError(
                f"{name}: autoreset_mode must be one of {', '.join(modes)}, got {given!r}"
                f"{suggestion(given, modes)}"
            ) from None
    declared = (envs.metadata or {}).get("autoreset_mode")
    if declared is None:
        raise EnvError(
            f"{name} doesn't say how it resets itself, and a wrong guess would corrupt every "
            'episode\'s end: set its metadata["autoreset_mode"], or the option autoreset_mode to '
            "SAME_STEP, NEXT_STEP or DISABLED"
        )
    return AutoresetMode(declared)
