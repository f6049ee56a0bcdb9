"""Acting in step with learning: who may begin an unroll, and whose action is withheld until then.

A quota says how far acting may run ahead of the weights. With `VersionShares` (`layout: sync`)
every environment gives its share of unrolls to each version, so the policy lag is zero; with
`LagTickets` (`learner.stale_unrolls: wait`) an unroll begins only if it will be learned from
before it is too old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpcrl.acting.policy import ActingPolicy, Decided

Ids = npt.NDArray[np.intp]
Unrolls = list[npt.NDArray[np.uint8]]


class Quota(Protocol):
    """Which environments of an acting rank may leave rows in unrolls.

    Attributes:
      open: `<bool>[N]`; an environment closes only where it has completed an unroll.
    """

    open: npt.NDArray[np.bool_]

    def load(self, version: int) -> None:
        """Weights of this version act from now on; may open environments."""

    def completed(self, ids: Ids) -> None:
        """Each of `ids` has completed an unroll; may close them."""

    def released(self, complete: Unrolls) -> Unrolls:
        """Return the unrolls `<uint8>[n, nbytes]` that go to the learner now, in this order.

        Args:
          complete: those of the environments that `completed` named since, in the same order.
        """


class VersionShares:
    """Every environment owes `unrolls` to each version, and nothing more. A `Quota`."""

    def __init__(self, num_envs: int, unrolls: int):
        self.open = np.ones(num_envs, bool)
        self._share = unrolls
        self._delivered = np.zeros(num_envs, np.intp)

    def load(self, version: int) -> None:
        """Every environment owes its share again."""
        self._delivered[:] = 0
        self.open[:] = True

    def completed(self, ids: Ids) -> None:
        """Close those that have given their share."""
        self._delivered[ids] += 1
        self.open[ids] = self._delivered[ids] < self._share

    def released(self, complete: Unrolls) -> Unrolls:
        """Return all of them."""
        return complete


class LagTickets:
    """An unroll begins with a ticket that says which learner step will take it. A `Quota`.

    The learner takes `per_step` unrolls of this rank at every step, in the order of their
    tickets, so ticket k is learned from at version base + k // per_step. Version v may begin it
    if that is at most v + max_lag. An environment that completes an unroll begins the next one
    with the same row, and waits for newer weights if there is no ticket for it.

    Args:
      num_envs: N, at most `per_step * (max_lag + 1)`, or some would always wait.
      per_step: unrolls of this rank in each batch of its learner.
      max_lag: learner steps by which an unroll may be behind.
    """

    def __init__(self, num_envs: int, per_step: int, max_lag: int):
        self.open = np.zeros(num_envs, bool)
        self._per_step = per_step
        self._max_lag = max_lag
        self._base: int | None = None
        self._limit = 0
        self._next_ticket = 0
        self._ticket = np.full(num_envs, -1, np.int64)
        self._waiting = deque(range(num_envs))
        self._finished: deque[int] = deque()
        self._early: dict[int, npt.NDArray[np.uint8]] = {}
        self._next_to_send = 0

    def load(self, version: int) -> None:
        """Hand out the tickets of one version more, to those that have waited longest.

        The first version that arrives is the base: the learner can't step without this rank.
        """
        if self._base is None:
            self._base = version
        self._limit = (version - self._base + self._max_lag + 1) * self._per_step
        self._hand_out()

    def completed(self, ids: Ids) -> None:
        """Take back the tickets of `ids`, and give them others as far as there are any."""
        self._finished.extend(self._ticket[ids].tolist())
        self.open[ids] = False
        self._waiting.extend(ids.tolist())
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._next_ticket < self._limit:
            env = self._waiting.popleft()
            self._ticket[env] = self._next_ticket
            self.open[env] = True
            self._next_ticket += 1

    def released(self, complete: Unrolls) -> Unrolls:
        """Return unrolls in the order of their tickets; those that are early wait."""
        for unrolls in complete:
            for row in range(len(unrolls)):
                self._early[self._finished.popleft()] = unrolls[row : row + 1]
        ready = []
        while self._next_to_send in self._early:
            ready.append(self._early.pop(self._next_to_send))
            self._next_to_send += 1
        return ready


class PacedPolicy(ActingPolicy):
    """An acting policy whose environments leave rows only as far as a quota allows.

    The row that completes an unroll is its bootstrap and, with an action of its own, row 0 of
    the following one. Where that may not begin yet, its caller withholds the action: it calls
    `hold`, and `resume` once newer weights were loaded. An environment whose neighbours, which
    step with it, may go on (episodes that were truncated fill unrolls sooner) acts on and
    leaves no rows.

    Args:
      *arguments: of `ActingPolicy`.
      quota: who may leave rows.
    """

    def __init__(self, *arguments: Any, quota: Quota):
        super().__init__(*arguments)
        self._quota = quota
        self._latest: Decided | None = None
        self._held: list[Decided] = []
        self._resuming = False

    @property
    def satisfied(self) -> npt.NDArray[np.bool_]:
        """Environments that may leave no rows before newer weights come, `<bool>[N]`."""
        return ~self._quota.open

    def load(self, parameters: npt.NDArray[np.float32], version: int) -> None:
        """Swap in newer weights; environments may go on."""
        super().load(parameters, version)
        self._quota.load(version)

    def record(self) -> list[npt.NDArray[np.uint8]]:
        """Append the rows that are owed; return the unrolls that may go to the learner."""
        self._latest = self._decided[-1] if self._decided else None
        return self._quota.released(super().record())

    def _show(self, decided: Decided) -> None:
        if self.sink is not None and self._resuming:
            self.sink.replace(decided.ids, decided.fields)
        else:
            super()._show(decided)

    def _owed(self, decided: Decided) -> Decided:
        owed = self._quota.open[decided.ids]
        self.idle_rows += int((~owed).sum())
        return decided if owed.all() else decided.of(owed)

    def _completed(self, ids: Ids) -> None:
        self._quota.completed(ids)
        # The row that is at hand is of a version that may not begin their next unroll.
        self._store.begin(ids[~self._quota.open[ids]])

    def hold(self, ids: Ids) -> None:
        """Keep the last rows of `ids`, all of them satisfied; their actions are withheld.

        Rows that the last `act` did not hold (of environments that reset themselves) are left
        out.
        """
        if self._latest is not None:
            chosen = np.isin(self._latest.ids, ids)
            if chosen.any():
                self._held.append(self._latest.of(chosen))

    def resume(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.generic]]:
        """Act on the held rows of `ids` with the current weights; they begin new unrolls.

        Returns:
          Their ids `<intp>[n]` and actions `[n, A]`; they are held no more.
        """
        held = Decided.joined(self._held) if self._held else None
        chosen = np.isin(held.ids, ids) if held else np.zeros(0, bool)
        if held is None or not chosen.any():
            return np.zeros(0, np.intp), self._previous_action[:0]
        self._held = [] if chosen.all() else [held.of(~chosen)]
        rows = held.of(chosen)
        self._rewind(rows)
        fields: Mapping[str, Any] = rows.fields
        flags = {name: fields[name] for name in ("terminated", "start", "final")}
        actions = self._evaluate(rows.ids, rows.observation(), fields["reward"], **flags)
        self._resuming = True
        self.record()  # completes nothing: an unroll has at least two rows
        self._resuming = False
        return rows.ids, actions
