"""A team: ranks that step the same environments together, each by its leader's word.

The user's environment is one program over the team's communicator. All ranks of the team make
it, and take every reset and step with the same seeds and actions; the leader's results count.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from env_wrappers import EnvBatch, EnvError, StepBatch
from hpcrl.comm.link import Group
from hpcrl.comm.wire import Layout
from hpcrl.specs import ActionSpec, ArraySpec

_DECISIONS = ("terminated", "truncated", "ended", "valid")


class Order(IntEnum):
    """What a leader has its followers do."""

    RESET = 0
    STEP = 1
    CLOSE = 2


class Team:
    """One rank's place in its team.

    Attributes:
      leads: whether this rank is the leader.
      env_communicator: for the environments alone; messages of hpcrl don't meet theirs.
    """

    def __init__(self, group: Group):
        """Collective over the team."""
        self._group = group
        self.leads = group.rank == 0
        self.env_communicator: Any = group.communicator and group.communicator.Dup()

    def order_layout(self, rows: int, action: ActionSpec) -> Layout:
        """Return an order's message: for which group of `rows` environments, with which actions."""
        return Layout(
            "order",
            {
                "order": ArraySpec((), "int64"),
                "group": ArraySpec((), "int64"),
                "action": ArraySpec((rows, action.size), action.dtype),
            },
        )

    def share(self, order: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8]:
        """Collective over the team: return the leader's order."""
        data = self._group.broadcast(None if order is None else order.tobytes(), 0)
        return np.frombuffer(data, np.uint8)

    def check_agreed(self, name: str, batch: StepBatch) -> None:
        """Collective over the team: every rank's environments ended the same episodes.

        Raises:
          EnvError: they didn't, so the next step would be of different episodes.
        """
        mine = np.stack([getattr(batch, decision) for decision in _DECISIONS]).astype(np.uint8)
        all_ranks = self._group.allgather(mine)
        wrong = np.argwhere(all_ranks != all_ranks[0])
        if len(wrong):
            rank, decision, row = wrong[0]
            what = _DECISIONS[decision]
            raise EnvError(
                f"{name}: ranks of one environment disagree: {what} is "
                f"{bool(all_ranks[0, decision, row])} on rank 0 of its communicator and "
                f"{bool(all_ranks[rank, decision, row])} on rank {rank}; it must be decided from "
                "what all ranks know"
            )


class LedBatch(EnvBatch):
    """The leader's environments: what is done to them, the followers do, too.

    Args:
      envs: this rank's part of the environments.
      team: its team.
      index: of the group among the leader's.
    """

    def __init__(self, envs: EnvBatch, team: Team, index: int):
        self.spec, self.num_envs = envs.spec, envs.num_envs
        self._envs = envs
        self._team = team
        layout = team.order_layout(envs.num_envs, ActionSpec.from_json(envs.spec["action"]))
        self._buffer = layout.buffer()
        self._order = layout.views(self._buffer)
        self._order["group"][...] = index
        self._closed = False

    def _give(self, order: Order) -> None:
        self._order["order"][...] = order
        self._team.share(self._buffer)

    def reset(self) -> StepBatch:
        """Start an episode everywhere."""
        self._give(Order.RESET)
        return self._agreed(self._envs.reset())

    def step(self, actions: npt.NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere."""
        self._order["action"][:] = actions
        self._give(Order.STEP)
        return self._agreed(self._envs.step(actions))

    def _agreed(self, batch: StepBatch) -> StepBatch:
        self._team.check_agreed(self.spec["name"], batch)
        return batch

    def close(self) -> None:
        """Release the environments on all ranks of the team."""
        if not self._closed:
            self._closed = True
            self._give(Order.CLOSE)
            self._envs.close()
