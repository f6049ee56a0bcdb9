"""Control values that every member of a group agrees on.

A branch around a collective must be taken by all members or by none, so it is taken on
the outcome of a vote and never on something that only one member knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from hpcrl.comm.link import Gathering, Group

Rule = Literal["sum", "max", "min", "each"]
"""How a field is reduced; each: not at all, member i's value of `name` is `name_i`."""

_REDUCE = {"sum": np.add.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}


class Agreement:
    """Repeated votes on a fixed set of numbers, one small all-gather each.

    Each member reduces the gathered vectors by itself, in the same order, so the outcome
    is the same to the last bit and fields with different rules need only one collective.

    Args:
      group: who votes.
      fields: how each field is reduced, by name; equal on all members.
    """

    def __init__(self, group: Group, fields: Mapping[str, Rule]):
        self._group = group
        self._fields = dict(fields)
        self._gathering: Gathering | None = None

    def start(self, values: Mapping[str, float]) -> None:
        """Cast this member's vote. Each member's n-th vote belongs to the n-th outcome.

        Args:
          values: one number per field; integers are exact up to 2**53.

        Raises:
          RuntimeError: the outcome of the vote before was not fetched yet.
          ValueError: `values` names other fields than the agreement has.
        """
        if self._gathering is not None:
            raise RuntimeError("a vote was cast before the outcome of the previous one")
        if values.keys() != self._fields.keys():
            raise ValueError(f"vote on {sorted(values)}, agreed are {sorted(self._fields)}")
        vote = np.array([values[name] for name in self._fields], np.float64)
        self._gathering = self._group.start_allgather(vote)

    def poll(self) -> dict[str, float] | None:
        """Return the outcome once, or None while a vote is missing or none was cast."""
        if self._gathering is None or not self._gathering.done():
            return None
        votes = self._gathering.result
        self._gathering = None
        outcome: dict[str, float] = {}
        for column, (name, rule) in enumerate(self._fields.items()):
            if rule == "each":
                outcome |= {f"{name}_{i}": float(v) for i, v in enumerate(votes[:, column])}
            else:
                outcome[name] = float(_REDUCE[rule](votes[:, column]))
        return outcome

    def vote(self, values: Mapping[str, float]) -> dict[str, float]:
        """Cast a vote and wait for its outcome.

        Raises:
          DeadlineError: a member did not vote in time.
        """
        self.start(values)
        waiter = self._group.waiter(f"a vote on {', '.join(self._fields)}")
        while (outcome := self.poll()) is None:
            waiter.idle()
        return outcome
