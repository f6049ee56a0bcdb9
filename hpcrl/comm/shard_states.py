"""Whole states of shards, from the servers that hold them to the root, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Incoming, Link, wait_until
from hpcrl.comm.wire import Layout, Tag


class ShardState(NamedTuple):
    """One shard between two gradients.

    Attributes:
      version: gradients that it has taken.
      step_count: the optimizer's.
      arrays: `<float32>[n]` each: "model" and the optimizer's moments by name.
    """

    version: int
    step_count: int
    arrays: Mapping[str, npt.NDArray[np.float32]]


class ShardReporter:
    """A server's end."""

    def __init__(self, link: Link, root: int, layout: Layout):
        buffer = layout.buffer()
        self._views = layout.views(buffer)
        self._sender = link.plane("control").sender(root, Tag.SHARD, buffer)
        self._waiter = link.waiter(
            lambda: f"{link.label} (rank {link.rank}) waited for the root to take its shard"
        )

    def send(self, state: ShardState) -> None:
        """Send a copy of the shard, once the one before has left."""
        wait_until(self._sender.done, self._waiter)
        self._views["version"][...] = state.version
        self._views["step_count"][...] = state.step_count
        for name, array in state.arrays.items():
            self._views[name][...] = array
        self._sender.start()

    def sent(self) -> bool:
        """Whether the last copy has left."""
        return self._sender.done()


class ShardCollector:
    """The root's end: the states of all other shards, once they were asked for."""

    def __init__(self, link: Link, servers: Sequence[int], layouts: Sequence[Layout]):
        self._servers = servers
        buffers = [layout.buffer() for layout in layouts]
        self._views = [layout.views(b) for layout, b in zip(layouts, buffers, strict=True)]
        self._receivers = link.plane("control").receivers(
            [Incoming(rank, Tag.SHARD, b) for rank, b in zip(servers, buffers, strict=True)]
        )
        self._missing: set[int] = set()

    def begin(self) -> None:
        """Await one state of each server."""
        self._missing = set(range(len(self._servers)))
        for index in self._missing:
            self._receivers.start(index)

    def waits_for(self) -> list[int]:
        """Return the ranks whose state has not arrived."""
        return [self._servers[index] for index in sorted(self._missing)]

    def poll(self) -> bool:
        """Whether all states that were asked for are here."""
        self._missing.difference_update(self._receivers.poll())
        return not self._missing

    def states(self) -> list[ShardState]:
        """Return what arrived last, as views that the next states overwrite."""
        return [_state_of(views) for views in self._views]

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._receivers.cancel()


def _state_of(views: Mapping[str, npt.NDArray[Any]]) -> ShardState:
    arrays = {n: v for n, v in views.items() if n not in ("version", "step_count")}
    return ShardState(int(views["version"]), int(views["step_count"]), arrays)
