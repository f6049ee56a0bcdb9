"""What the conformance suite knows of a family, and plain loops that record what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from env_wrappers import IsolatedBatch, Isolation, make
from env_wrappers.families import FAMILIES, Family
from env_wrappers.observations import ObservationCodec
from hpcrl.specs import EnvSpec

ROOT = Path(__file__).resolve().parents[2]
NUM_ENVS = 3


class Subject(NamedTuple):
    """An example of a family, stepped here or in a child process under `python`."""

    family: Family
    isolated: bool
    python: str = ""

    @property
    def key(self) -> str:
        return f"{self.family.key}-{'isolated' if self.isolated else 'direct'}"

    @property
    def name(self) -> str:
        return f"{self.family.name}:{self.family.example}"

    @property
    def rows(self) -> int:
        return NUM_ENVS * self.family.rows_per_env

    def options(self, limit_steps=0, **more) -> dict[str, Any]:
        """The example's; with a limit, episodes are cut off after so many steps."""
        key, per_step = self.family.limit
        limit = {key: limit_steps * per_step} if limit_steps else {}
        return {**self.family.example_options, **limit, **more}

    def make(self, seeds=None, **options):
        """A batch of `rows` rows; the seeds are of the rows."""
        seeds = list(range(100, 100 + self.rows)) if seeds is None else seeds
        if not self.isolated:
            return make(self.name, len(seeds), seeds, self.options(**options))
        isolation = Isolation(python=self.python, start_timeout_s=300.0, step_timeout_s=120.0)
        return IsolatedBatch(self.name, len(seeds), seeds, self.options(**options), isolation)


def own_python(family):
    """The interpreter that `make envs` made for a family whose packages conflict with ours."""
    python = ROOT / ".venv-envs" / family.key / "bin" / "python"
    return str(python) if python.exists() else ""


def subjects():
    """Every family with an example that can run here: directly and isolated, or isolated only."""
    found = []
    for family in FAMILIES:
        if not family.example:
            continue
        if family.versions() is not None:
            found += [Subject(family, False), Subject(family, True)]
        elif own_python(family):
            found.append(Subject(family, True, own_python(family)))
    return found


def not_run():
    """Lines on the families that can't run here."""
    run = {subject.family.key for subject in subjects()}
    return [
        f"{family.key}: not installed ({family.install_command})"
        for family in FAMILIES
        if family.example and family.key not in run
    ]


class Actions:
    """Random actions of each row, a stream of its own that only real decisions draw from."""

    def __init__(self, spec, rows):
        self.action = EnvSpec.from_json(spec).action
        self.streams = [np.random.default_rng([7, row]) for row in range(rows)]
        self.now = np.zeros((rows, self.action.size), self.action.dtype)

    def draw(self, valid):
        """Actions `[E, A]`; those of rows that are not valid stay as they were."""
        for row in np.flatnonzero(valid):
            self.now[row] = self._one(self.streams[row])
        return self.now.copy()

    def _one(self, rng):
        values: list[float] = []
        for part in self.action.parts:
            if part.kind == "discrete":
                values += [rng.integers(count) for count in part.nvec]
            else:
                low, high = np.maximum(part.low, -2.0), np.minimum(part.high, 2.0)
                values += rng.uniform(low, high).tolist()
        return values


class Transition(NamedTuple):
    """One transition of one row; observations as bytes, the next one None after termination."""

    seen: bytes
    action: bytes
    reward: float
    after: bytes | None
    terminated: bool
    truncated: bool


class Recording(NamedTuple):
    """Transitions of each row, and (return, steps) of its episodes, as the batch told them."""

    transitions: list[list[Transition]]
    episodes: list[list[tuple[float, int]]]


def as_bytes(leaves, row):
    return b"".join(np.ascontiguousarray(leaf[row]).tobytes() for leaf in leaves.values())


def record(batch, steps, look=None):
    """Step until every row has `steps` transitions, as a receiver that knows only `StepBatch`.

    Args:
      batch: the environments.
      steps: transitions of each row.
      look: called with every StepBatch.
    """
    rows = batch.num_envs
    actions = Actions(batch.spec, rows)
    found = Recording([[] for _ in range(rows)], [[] for _ in range(rows)])
    step = batch.reset()
    seen = [as_bytes(step.observation, row) for row in range(rows)]
    chosen = actions.draw(step.valid)
    for _ in range(20 * steps + 100):
        if look:
            look(step)
        step = batch.step(chosen)
        for row in np.flatnonzero(step.valid):
            following = as_bytes(step.observation, row)
            after = None if step.terminated[row] else following
            if step.truncated[row]:
                after = as_bytes(step.final_observation, row)
            found.transitions[row].append(
                Transition(
                    seen[row],
                    chosen[row].tobytes(),
                    float(step.reward[row]),
                    after,
                    bool(step.terminated[row]),
                    bool(step.truncated[row]),
                )
            )
            if step.ended[row]:
                ended = float(step.episode_return[row]), int(step.episode_steps[row])
                found.episodes[row].append(ended)
            seen[row] = following
        if min(map(len, found.transitions)) >= steps:
            return Recording([row[:steps] for row in found.transitions], found.episodes)
        chosen = actions.draw(step.valid)
    raise AssertionError(f"only {list(map(len, found.transitions))} transitions of {steps}")


def plain_loop(env, seed, row, spec, steps):
    """Transitions of one gymnasium environment, stepped by hand: an oracle for row `row`."""
    codec = ObservationCodec(env.observation_space)
    actions = Actions(spec, row + 1)
    decode = _decoder(env.action_space)

    def flat(observation):
        arrays = codec.new_arrays(1)
        codec.write_row(arrays, 0, observation)
        return as_bytes(arrays, 0)

    valid = np.arange(row + 1) == row
    observation, _ = env.reset(seed=seed)
    seen, found = flat(observation), []
    for _ in range(steps):
        action = actions.draw(valid)[row]
        observation, reward, terminated, truncated, _ = env.step(decode(action))
        truncated = truncated and not terminated
        after = None if terminated else flat(observation)
        found.append(
            Transition(
                seen,
                action.tobytes(),
                float(np.float32(reward)),
                after,
                bool(terminated),
                bool(truncated),
            )
        )
        if terminated or truncated:
            observation, _ = env.reset()
        seen = flat(observation)
    return found


def _decoder(space):
    """From a flat action to one of `space`, for the spaces that the examples have."""
    if hasattr(space, "n"):
        return lambda action: int(action[0]) + int(space.start)
    return lambda action: np.clip(action, space.low, space.high).astype(space.dtype)
