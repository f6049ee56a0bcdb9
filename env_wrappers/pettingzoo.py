"""PettingZoo's parallel environments: agents that share one policy, each a row of the batch.

The rows of an environment stand one after the other, in the order of its `possible_agents`.
An agent that is done while others play on has its last result held back: its row is not valid
until the environment starts anew, and then shows that result with the first observation of
the next episode. So nothing is asked of it, or learned from it, in between.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env_wrappers.actions import ActionCodec
from env_wrappers.batch import (
    Arrays,
    EnvBatch,
    StepBatch,
    as_rewards,
    env_spec,
    reset_batch,
)
from env_wrappers.errors import EnvError
from env_wrappers.observations import ObservationCodec
from env_wrappers.single import COMMON, refuse_unknown, resolve

# kwargs: passed to the module's `parallel_env`, such as {N: 3}.
# max_episode_steps: here, steps after which all agents that still play are truncated.
DEFAULTS: dict[str, Any] = {**COMMON, "kwargs": {}}

_COLLECTIONS = ("mpe2", "pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl")


class AgentsBatch(EnvBatch):
    """Parallel environments of K agents each: E = environments times K; see the module."""

    def __init__(
        self,
        name: str,
        envs: Sequence[Any],
        seeds: Sequence[int],
        max_episode_steps: int = 0,
        frame_stack: int = 1,
    ) -> None:
        """Take over `envs`.

        Args:
          name: full name for the spec and for messages.
          envs: environments with PettingZoo's parallel API, of the same agents.
          seeds: one for each row; that of its first agent is the environment's.
          max_episode_steps: as the option; 0: no limit of ours.
          frame_stack: time steps that the network is to see stacked.

        Raises:
          EnvError: agents with different spaces, or a space that cannot travel.
        """
        self._name = name
        self._envs = list(envs)
        self._agents: list[str] = list(envs[0].possible_agents)
        self.num_envs = len(envs) * len(self._agents)
        self._seeds: list[int | None] = list(seeds[:: len(self._agents)])
        self._max_steps = max_episode_steps
        observed = _shared_space(name, envs[0].observation_space, self._agents, "observation")
        acted = _shared_space(name, envs[0].action_space, self._agents, "action")
        self._observations = ObservationCodec(observed)
        self._actions = ActionCodec(acted, self.num_envs)
        self.spec = env_spec(name, self._observations.spec(frame_stack), self._actions.spec())
        # What each row's agent saw last, and what its episode gave so far.
        self._raw = self._observations.new_raw(self.num_envs)
        self._write = self._observations.writer(self._raw)
        self._last = np.zeros(self.num_envs, np.float32)
        self._terminated, self._truncated = np.zeros((2, self.num_envs), np.bool_)
        self._return = np.zeros(self.num_envs, np.float64)
        self._steps = np.zeros(self.num_envs, np.int32)

    def reset(self) -> StepBatch:
        """Start an episode everywhere; only the first call uses the seeds."""
        for index, seed in enumerate(self._seeds):
            self._restart(index, seed)
        self._seeds = [None] * len(self._envs)
        return reset_batch(self._newest(), self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`."""
        playing = ~(self._terminated | self._truncated)
        gained, terminated, truncated = self._step_all(actions, playing.tolist())
        self._last = np.where(playing, gained, self._last)
        self._return += gained
        self._steps += playing
        self._terminated |= terminated
        truncated |= playing & (self._steps == self._max_steps)
        self._truncated |= truncated & ~self._terminated
        done = self._terminated | self._truncated
        over = done.reshape(len(self._envs), -1).all(1).repeat(len(self._agents))
        valid = ~done | over
        cut = self._truncated & over
        shown = StepBatch(
            observation={},
            reward=np.where(valid, self._last, np.float32(0)),
            terminated=self._terminated & over,
            truncated=cut,
            valid=valid,
            restarted=np.zeros(self.num_envs, np.bool_),
            final_observation=self._newest() if cut.any() else None,
            ended=over,
            episode_return=self._return.astype(np.float32),
            episode_steps=self._steps.copy(),
        )
        for index in np.flatnonzero(over[:: len(self._agents)]).tolist():
            self._restart(index, None)
        return shown._replace(observation=self._newest())

    def check(self, step: StepBatch) -> None:
        """Raise EnvError unless all observations of agents that play are in their space."""
        for leaves, rows in (
            (step.observation, step.valid),
            (step.final_observation, step.truncated),
        ):
            if leaves is not None:
                self._observations.check_bounds({k: leaf[rows] for k, leaf in leaves.items()})

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _rows(self, index: int) -> slice:
        return slice(index * len(self._agents), (index + 1) * len(self._agents))

    def _newest(self) -> Arrays:
        """What each row's agent saw last, copied."""
        return self._observations.travelling([array.copy() for array in self._raw])

    def _restart(self, index: int, seed: int | None) -> None:
        """Start an episode of one environment and note its first observations."""
        rows = self._rows(index)
        first, _ = self._envs[index].reset(seed=seed)
        missing = [agent for agent in self._agents if agent not in first]
        if missing:
            raise EnvError(
                f"{self._name}: agent {missing[0]!r} is not there at the start of an episode; all "
                "agents must be, as each of them is a row of the batch"
            )
        for row, agent in enumerate(self._agents, rows.start):
            self._write(row, first[agent])
        for totals in (self._last, self._terminated, self._truncated, self._return, self._steps):
            totals[rows] = 0

    def _step_all(
        self, actions: NDArray[Any], playing: Sequence[bool]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_]]:
        """Step every environment with the agents that still play; return what these get.

        Returns:
          `<float32>[E]` rewards, zero for those that don't play; `<bool>[E]` terminated and
          truncated.
        """
        decoded = self._actions.decode_rows(actions)
        rewards: list[Any] = [0.0] * self.num_envs
        flags = np.zeros((2, self.num_envs), np.bool_)
        for index, env in enumerate(self._envs):
            begin = index * len(self._agents)
            living = [(agent, row) for row, agent in enumerate(self._agents, begin) if playing[row]]
            given = env.step({agent: decoded[row] for agent, row in living})
            seen, gained, terminated, truncated, _ = given
            for agent, row in living:
                if agent not in seen:
                    raise EnvError(
                        f"{self._name}: agent {agent!r} left without an end of its episode"
                    )
                self._write(row, seen[agent])
                rewards[row] = gained[agent]
                if terminated[agent] or truncated[agent]:
                    flags[:, row] = terminated[agent], truncated[agent]
        return as_rewards(self._name, rewards, self.num_envs), *flags


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make `target`, such as "simple_spread_v3" or "sisl.pursuit_v4"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such environment, a number of rows that isn't a multiple of the agents, or an
        option that cannot work.
    """
    resolved = resolve(name, options, DEFAULTS)
    build = _find(name, target)
    try:
        first = build(**resolved["kwargs"])
    except TypeError as error:
        if "argument" not in str(error):
            raise
        kwargs = resolved["kwargs"]
        raise EnvError(f"{name} doesn't take all of the kwargs {kwargs}: {error}") from error
    agents = len(first.possible_agents)
    if num_envs % agents:
        raise EnvError(
            f"{name} has {agents} agents, each a row of the batch, which is asked to have "
            f"{num_envs} rows: make env.envs_per_actor / env.groups a multiple of {agents}"
        )
    envs = [first, *(build(**resolved["kwargs"]) for _ in range(num_envs // agents - 1))]
    return AgentsBatch(name, envs, seeds, resolved["max_episode_steps"], resolved["frame_stack"])


def _find(name: str, target: str) -> Any:
    """The `parallel_env` of the module that `target` names, alone or with its collection."""
    known = dict(_modules())
    module = known.get(target) or known.get(target.rpartition(".")[2])
    if module is None or not module.endswith(target):
        raise refuse_unknown("PettingZoo environment", target, list(known))
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise EnvError(f"{name} cannot be imported: {error}") from error
    build = getattr(loaded, "parallel_env", None)
    if build is None:
        raise EnvError(f"{name} has no parallel form: its agents act in turn")
    return build


def _modules() -> list[tuple[str, str]]:
    """(name, dotted name) of every environment's module that is installed."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    found = []
    for collection in _COLLECTIONS:
        try:
            package = importlib.import_module(collection)
        except ImportError:
            continue
        found += [
            (module.name, f"{collection}.{module.name}")
            for module in pkgutil.iter_modules(package.__path__)
            if module.name.rpartition("_v")[2].isdigit()
        ]
    return found


def _shared_space(name: str, space_of: Any, agents: Sequence[str], what: str) -> Any:
    """The space that all agents have."""
    spaces = [space_of(agent) for agent in agents]
    for agent, space in zip(agents, spaces, strict=True):
        if space != spaces[0]:
            raise EnvError(
                f"{name}: the {what} space of agent {agent!r} is {space}, that of {agents[0]!r} "
                f"{spaces[0]}: agents that share a policy need the same"
            )
    return spaces[0]
