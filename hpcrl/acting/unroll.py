"""Assembles the steps of many environments into overlapping unrolls, by strided writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hpcrl.comm.wire import Layout

Ids = npt.NDArray[np.intp]
Arrays = Mapping[str, npt.NDArray[np.generic]]

_HEADER = ("env_id", "run_id", "unroll_index", "core_state", "priority")


class UnrollStore:
    """One unroll under construction per environment.

    Row T of a finished unroll (its bootstrap row) becomes row 0 of the environment's next
    one, so consecutive unrolls share exactly one row and no transition is lost. The stack
    prefix stored with an unroll is that BEFORE its row 0; so is the core state, but with
    `burn_in_steps` it is that before the row so many rows earlier, in the unroll before.
    The first unroll of a run has no rows before it: its state is that before its row 0.

    Args:
      layout: the unroll message's layout (`wire.unroll_layout`).
      unroll_steps: T.
      env_ids: `<int64>[N]` global environment id of each row.
      burn_in_steps: rows before row 0 from which a learner unrolls the network; below T.
      cross_episodes: whether an unroll goes on with the next episode. If not, the rest of the
        unroll is filled with copies of the next episode's first row, marked `final` so that no
        transition starts from them, and that row itself is row T.
    """

    def __init__(
        self,
        layout: Layout,
        unroll_steps: int,
        env_ids: npt.NDArray[np.int64],
        burn_in_steps: int = 0,
        cross_episodes: bool = True,
    ):
        num_rows = len(env_ids)
        self._steps = unroll_steps
        self._cross_episodes = cross_episodes
        # Row T of an unroll is row 0 of the next, which burns in from `burn_in_steps` before it.
        self._state_position = unroll_steps - burn_in_steps
        self._buffer = layout.buffer(num_rows)
        views = layout.views(self._buffer)
        self._header = {name: views[name] for name in _HEADER if name in views}
        self._prefix = {n: v for n, v in views.items() if n.startswith("prefix:")}
        self._rows = {
            name: view
            for name, view in views.items()
            if name not in self._header and name not in self._prefix
        }
        self._header["env_id"][:] = env_ids
        self._next_state = np.zeros_like(self._header["core_state"])
        self._next_prefix = {name: np.zeros_like(view) for name, view in self._prefix.items()}
        self._length = np.zeros(num_rows, np.intp)

    def discard(self, ids: Ids, run_ids: npt.NDArray[np.int64]) -> None:
        """Forget the partial unrolls of restarted environments; they go on as `run_ids`."""
        self._length[ids] = 0
        self._header["run_id"][ids] = run_ids
        self._header["unroll_index"][ids] = 0

    def begin(self, ids: Ids) -> None:
        """Forget the partial unrolls of `ids`; the next row is the row 0 of their next one."""
        self._length[ids] = 0

    def append(
        self, ids: Ids, rows: Arrays, core_state: npt.NDArray[np.float32], prefix: Arrays
    ) -> Ids:
        """Append one row to each of `ids`, which must be distinct.

        Args:
          ids: `[n]` rows of the store.
          rows: every field of `wire.row_fields`, `[n, ...]`.
          core_state: `<float32>[n, S]`, recurrent state before these rows.
          prefix: stacked leaves' last K-1 frames before these rows, `[n, K-1, ...]`.

        Returns:
          The ids whose unroll is complete; `take` them before the next append.
        """
        if not self._cross_episodes:
            length = self._length[ids]
            begun = (length > 0) & (length < self._steps)
            for index in np.flatnonzero(begun & (rows["start"] != 0)):
                self._fill_up(ids[index], index, rows, core_state)
        position = self._length[ids]
        first, last = position == 0, position == self._steps
        if first.any():
            self._header["core_state"][ids[first]] = core_state[first]
            for name, view in self._prefix.items():
                view[ids[first]] = prefix[name][first]
        for name, view in self._rows.items():
            view[ids, position] = rows[name]
        self._length[ids] += 1
        snapshot = position == self._state_position
        if snapshot.any():
            self._next_state[ids[snapshot]] = core_state[snapshot]
        if last.any():
            for name, view in self._next_prefix.items():
                view[ids[last]] = prefix[name][last]
        return ids[last]

    def _fill_up(
        self, env: np.intp, index: np.intp, rows: Arrays, core_state: npt.NDArray[np.float32]
    ) -> None:
        """End an environment's unroll at the episode's end; the row at `index` begins the next."""
        first, last = self._length[env], self._steps
        for name, view in self._rows.items():
            view[env, first:last] = rows[name][index]
        # The first copy still brings reward and termination of the last action.
        self._rows["reward"][env, first + 1 : last] = 0
        self._rows["terminated"][env, first + 1 : last] = False
        self._rows["final"][env, first:last] = True
        if self._state_position >= first:
            self._next_state[env] = core_state[index]
        self._length[env] = last

    def take(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Return copies of complete unrolls, `<uint8>[len(ids), nbytes]`, and begin the next."""
        unrolls = self._buffer[ids]
        for view in self._rows.values():
            view[ids, 0] = view[ids, self._steps]
        self._header["core_state"][ids] = self._next_state[ids]
        for name, view in self._prefix.items():
            view[ids] = self._next_prefix[name][ids]
        self._header["unroll_index"][ids] += 1
        self._length[ids] = 1
        return unrolls
