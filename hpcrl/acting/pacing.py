"""Acting in step with learning: every environment gives its share of each version, then waits.

So every learner step takes each environment's unrolls of the newest weights and nothing else:
the policy lag is zero by construction, and no unroll is acted by two versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcrl.acting.policy import ActingPolicy, Decided

Ids = npt.NDArray[np.intp]


class PacedPolicy(ActingPolicy):
    """An acting policy whose environments owe a fixed number of unrolls to each version.

    The row that completes the last unroll is its bootstrap and, with an action of the next
    version, row 0 of the following one. Its caller therefore withholds that action: it calls
    `hold`, and `resume` once newer weights were loaded. An environment whose neighbours, which
    step with it, are not done yet (episodes that were truncated fill unrolls sooner) acts on
    and leaves no rows.

    Args:
      *arguments: of `ActingPolicy`.
      unrolls_per_version: what each environment owes.
    """

    def __init__(self, *arguments: Any):
        *arguments_of_policy, self._share = arguments
        super().__init__(*arguments_of_policy)
        self._delivered = np.zeros(len(self.evaluation), np.intp)
        self._latest: Decided | None = None
        self._held: list[Decided] = []
        self._resuming = False

    @property
    def satisfied(self) -> npt.NDArray[np.bool_]:
        """Environments that owe nothing to the current version any more, `<bool>[N]`."""
        return self._delivered >= self._share

    def load(self, parameters: npt.NDArray[np.float32], version: int) -> None:
        """Swap in newer weights; every environment owes its share again."""
        super().load(parameters, version)
        self._delivered[:] = 0
        # No row of another version begins an unroll, not even one of an environment at rest.
        self._store.begin(np.arange(len(self._delivered)))

    def record(self) -> list[npt.NDArray[np.uint8]]:
        """Append the rows that are owed; return the unrolls that are complete."""
        self._latest = self._decided[-1] if self._decided else None
        return super().record()

    def _show(self, decided: Decided) -> None:
        if self.sink is not None and self._resuming:
            self.sink.replace(decided.ids, decided.fields)
        else:
            super()._show(decided)

    def _owed(self, decided: Decided) -> Decided:
        owed = ~self.satisfied[decided.ids]
        self.idle_rows += int((~owed).sum())
        return decided if owed.all() else decided.of(owed)

    def _completed(self, ids: Ids) -> None:
        self._delivered[ids] += 1

    def hold(self, ids: Ids) -> None:
        """Keep the last rows of `ids`, all of them satisfied; their actions are withheld.

        Rows that the last `act` did not hold (of environments that reset themselves) are left
        out.
        """
        if self._latest is not None:
            chosen = np.isin(self._latest.ids, ids)
            if chosen.any():
                self._held.append(self._latest.of(chosen))

    def resume(self) -> tuple[Ids, npt.NDArray[np.generic]]:
        """Act on the held rows with the current weights; they begin new unrolls.

        Returns:
          Their ids `<intp>[n]` and actions `[n, A]`; nothing is held afterwards.
        """
        if not self._held:
            return np.zeros(0, np.intp), self._previous_action[:0]
        rows = Decided.joined(self._held)
        self._held.clear()
        self._rewind(rows)
        fields: Mapping[str, Any] = rows.fields
        flags = {name: fields[name] for name in ("terminated", "start", "final")}
        actions = self._evaluate(rows.ids, rows.observation(), fields["reward"], **flags)
        self._resuming = True
        self.record()  # completes nothing: an unroll has at least two rows
        self._resuming = False
        return rows.ids, actions
