"""From the rows that acting evaluates to whole episodes in the order of play.

Rows follow the time semantics of `types`: a row carries the result of the action before it. An
episode follows the convention of datasets: its step t holds the observation, the action chosen
from it, and that action's reward and end.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from hpcrl.specs import ArraySpec, EnvSpec

Array = npt.NDArray[np.generic]
Ending = Literal["terminated", "truncated", "interrupted"]

_CHUNK_BYTES = 2**16
_MAX_CHUNK_ROWS = 256


def is_selected(env_id: int, episode: int, fraction: float) -> bool:
    """Whether an episode belongs to the recorded `fraction`: a hash of its identity decides.

    Any process can therefore tell which episodes must be there, and a higher fraction records
    all that a lower one does.
    """
    digest = hashlib.blake2b(f"{env_id}/{episode}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def column_specs(
    env: EnvSpec, behaviour: Mapping[str, ArraySpec], fields: Sequence[str]
) -> dict[str, ArraySpec]:
    """Return the step columns of a recording with the optional `fields`, without the time axis."""
    columns: dict[str, ArraySpec] = {}
    if "observation" in fields:
        columns |= {f"observation/{path}": leaf.array for path, leaf in env.observation.items()}
    columns |= {
        "action": env.action.array,
        "reward": ArraySpec((), "float32"),
        "terminated": ArraySpec((), "bool"),
        "truncated": ArraySpec((), "bool"),
    }
    if "policy_version" in fields:
        columns["policy_version"] = ArraySpec((), "int64")
    if "behaviour" in fields:
        columns |= {f"behaviour/{name}": spec for name, spec in behaviour.items()}
    return columns


class Budget:
    """Bytes that may be held at once, shared by two threads."""

    def __init__(self, limit_bytes: int):
        self._left = limit_bytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Reserve, or return False where it doesn't fit."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Return what was taken."""
        with self._lock:
            self._left += nbytes


@dataclass
class Episode:
    """A finished episode, its rows still in chunks.

    Attributes:
      env_id: global id of its environment.
      number: how many episodes that environment had begun before, since the job's start.
      ending: "terminated"; "truncated" (the last row is its final observation); "interrupted"
        (the run stopped or the environment failed; the last row's action has no result).
      chunks: rows by field of `wire.row_fields`, `[n, ...]` each.
      last_reward: reward of the last action where that came with the next episode's first row.
      nbytes: taken from the budget.
      end_unix_s: when it ended.
    """

    env_id: int
    number: int
    ending: Ending = "interrupted"
    chunks: list[dict[str, Array]] = field(default_factory=list)
    last_reward: float = 0.0
    nbytes: int = 0
    end_unix_s: float = 0.0

    def steps(self, columns: Iterable[str]) -> dict[str, list[Array]]:
        """Return the columns, T rows each in pieces `[n, ...]` that are views where they can be.

        They are the rows, with rewards and ends moved to their actions.
        """
        rewards = np.concatenate([chunk["reward"] for chunk in self.chunks])
        last = np.array([self.last_reward], np.float32)
        has_last = self.ending == "terminated"
        reward = np.concatenate([rewards[1:], last]) if has_last else rewards[1:]
        count = len(reward)
        ends = np.arange(count) == count - 1
        made = {
            "reward": [reward],
            "terminated": [ends & has_last],
            "truncated": [ends & (self.ending == "truncated")],
        }
        return {
            name: made[name] if name in made else self._first_rows(row_field(name), count)
            for name in columns
        }

    def final_observation(self) -> dict[str, Array] | None:
        """Return the observation after the last step; None where the episode terminated."""
        if self.ending == "terminated":
            return None
        last = self.chunks[-1]
        return {
            name.removeprefix("obs:"): rows[-1]
            for name, rows in last.items()
            if name.startswith("obs:")
        }

    def _first_rows(self, name: str, count: int) -> list[Array]:
        pieces: list[Array] = []
        for chunk in self.chunks:
            pieces.append(chunk[name][:count])
            count -= len(pieces[-1])
        return pieces


def row_field(column: str) -> str:
    """Return the row field that a step column comes from."""
    return column.replace("observation/", "obs:", 1).replace("behaviour/", "behaviour:", 1)


class EpisodeBuilder:
    """Collects the rows of N environments and gives out their episodes.

    Memory is bounded: an episode that doesn't fit into the budget is dropped whole.

    Args:
      env_ids: `<int64>[N]` global environment ids.
      columns: step columns to keep (`column_specs`).
      fraction: of the episodes that are kept, see `is_selected`.
      budget: of the bytes held here and until the caller gives them back.
      clock: Unix seconds.
    """

    def __init__(
        self,
        env_ids: npt.NDArray[np.int64],
        columns: Mapping[str, ArraySpec],
        fraction: float,
        budget: Budget,
        clock: Callable[[], float] = time.time,
    ):
        specs = {
            row_field(n): s for n, s in columns.items() if n not in ("terminated", "truncated")
        }
        row_bytes = sum(spec.nbytes for spec in specs.values())
        self._chunk_rows = max(1, min(_MAX_CHUNK_ROWS, _CHUNK_BYTES // row_bytes))
        self._store = {
            name: np.zeros((len(env_ids), self._chunk_rows, *spec.shape), spec.dtype)
            for name, spec in specs.items()
        }
        self._env_ids = env_ids
        self._fraction = fraction
        self._budget = budget
        self._clock = clock
        self._fill = np.zeros(len(env_ids), np.intp)
        self._begun = np.zeros(len(env_ids), np.int64)
        self._open: list[Episode | None] = [None] * len(env_ids)
        self._kept = np.zeros(len(env_ids), bool)
        self.dropped = 0

    def add(self, ids: npt.NDArray[np.intp], rows: Mapping[str, Array]) -> list[Episode]:
        """Take one row of each of `ids`, which must be distinct; return episodes that ended."""
        ended: list[Episode | None] = []
        start, final = np.asarray(rows["start"]), np.asarray(rows["final"])
        for place in np.flatnonzero(start).tolist():
            ended.append(self._close_at_start(int(ids[place]), rows, place))
            self._begin(int(ids[place]))
        kept = self._kept[ids]
        if kept.all():
            self._append(ids, rows)
        else:
            self._append(ids[kept], {name: rows[name][kept] for name in self._store})
        for place in np.flatnonzero(final & kept).tolist():
            ended.append(self._end(int(ids[place]), "truncated"))
        return [episode for episode in ended if episode is not None]

    def replace(self, ids: npt.NDArray[np.intp], rows: Mapping[str, Array]) -> None:
        """Overwrite the last row of each of `ids`, the observation and flags being the same."""
        for place, row in enumerate(ids.tolist()):
            episode, count = self._open[row], int(self._fill[row])
            if episode is None:
                continue
            for name, store in self._store.items():
                last = store[row, count - 1 : count] if count else episode.chunks[-1][name][-1:]
                last[:] = rows[name][place]

    def end(self, row: int, reward: float, final: Mapping[str, Array] | None) -> Episode | None:
        """End the running episode of `row`, which is not played on.

        Args:
          row: of the environment.
          reward: of its last action.
          final: leaves of the observation after that; None where the episode terminated.

        Returns:
          The episode, None where it isn't kept.
        """
        if self._open[row] is None:
            return None
        if final is None:
            return self._end(row, "terminated", reward)
        last = {name: np.zeros_like(store[row, :1]) for name, store in self._store.items()}
        last["reward"][:] = reward
        last |= {f"obs:{p}": leaf[None] for p, leaf in final.items() if f"obs:{p}" in last}
        self._append(np.array([row]), last)
        return self._end(row, "truncated")

    def finish(self) -> list[Episode]:
        """Return the episodes that are still running, as interrupted."""
        ended = [self._end(row, "interrupted") for row in range(len(self._open))]
        return [episode for episode in ended if episode is not None]

    def _close_at_start(self, row: int, rows: Mapping[str, Array], place: int) -> Episode | None:
        if not rows["terminated"][place]:
            return self._end(row, "interrupted")
        reward = float(np.asarray(rows["reward"])[place])
        return self._end(row, "terminated", reward)

    def _begin(self, row: int) -> None:
        env_id, number = int(self._env_ids[row]), int(self._begun[row])
        self._begun[row] += 1
        if is_selected(env_id, number, self._fraction):
            self._open[row] = Episode(env_id, number)
            self._kept[row] = True

    def _append(self, ids: npt.NDArray[np.intp], rows: Mapping[str, Array]) -> None:
        position = self._fill[ids]
        for name, store in self._store.items():
            store[ids, position] = rows[name]
        self._fill[ids] += 1
        for row in ids[position == self._chunk_rows - 1].tolist():
            self._move_chunk(row)

    def _move_chunk(self, row: int) -> None:
        """Move the filled part of a row's chunk to its episode, or drop the episode."""
        episode, count = self._open[row], int(self._fill[row])
        self._fill[row] = 0
        if episode is None or count == 0:
            return
        nbytes = sum(store[row, :count].nbytes for store in self._store.values())
        if not self._budget.take(nbytes):
            self._budget.give(episode.nbytes)
            self._open[row], self._kept[row] = None, False
            self.dropped += 1
            return
        episode.nbytes += nbytes
        episode.chunks.append({n: store[row, :count].copy() for n, store in self._store.items()})

    def _end(self, row: int, ending: Ending, last_reward: float = 0.0) -> Episode | None:
        begun = self._open[row]
        if begun and self._num_rows(row) <= (ending == "interrupted"):
            self._budget.give(begun.nbytes)  # no action has a result yet
            self._fill[row], self._open[row] = 0, None
        self._move_chunk(row)
        episode = self._open[row]
        self._open[row], self._kept[row] = None, False
        if episode is not None:
            episode.ending, episode.last_reward = ending, last_reward
            episode.end_unix_s = self._clock()
        return episode

    def _num_rows(self, row: int) -> int:
        episode = self._open[row]
        moved = [len(chunk["reward"]) for chunk in episode.chunks] if episode else []
        return int(self._fill[row]) + sum(moved)
