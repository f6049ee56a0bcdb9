"""Start-up talk between all ranks: plain data, collective verdicts, and a fabric check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.comm.link import Group, Incoming, Link
from hpcrl.comm.wire import Tag
from hpcrl.timing import DeadlineError
from hpcrl.topology import Topology


class StartError(RuntimeError):
    """Start-up failed on some rank; every rank raises it alike.

    Attributes:
      code: the documented exit code.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class FabricError(RuntimeError):
    """Ranks that must talk to each other can't; only the rank that noticed raises it."""


def gather_json(group: Group, value: Any) -> list[Any]:
    """Return every member's JSON-able `value`, by group rank."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(group.allgather(np.array([len(data)], np.int64)).max())
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: len(data)] = data
    return [json.loads(row.tobytes()) for row in group.allgather(padded)]


def broadcast_json(group: Group, value: Any, root: int) -> Any:
    """Return group rank `root`'s JSON-able `value` on every member."""
    data = json.dumps(value).encode() if group.rank == root else None
    return json.loads(group.broadcast(data, root))


@dataclass(frozen=True)
class Failure:
    """Why one rank can't start."""

    message: str
    code: int


def agree_to_start(group: Group, label: str, failure: Failure | None) -> None:
    """Collective: return if no member has failed.

    Raises:
      StartError: on every member, with all different messages and the greatest code.
    """
    entry = None if failure is None else [label, failure.message, failure.code]
    failures = [f for f in gather_json(group, entry) if f is not None]
    if not failures:
        return
    by_message: dict[str, list[str]] = {}
    for who, message, _ in failures:
        by_message.setdefault(message, []).append(who)
    lines = [
        f"{who[0]}{f' and {len(who) - 1} more' if who[1:] else ''}: {message}"
        for message, who in by_message.items()
    ]
    raise StartError("\n".join(lines), max(code for _, _, code in failures))


def check_same(group: Group, what: str, digest: int, labels: Sequence[str]) -> None:
    """Collective: all members that have a `digest` (not 0) must have the same.

    Raises:
      StartError: on every member, naming one rank of each kind.
    """
    digests = group.allgather(np.array([digest], np.int64))[:, 0]
    seen: dict[int, str] = {}
    for rank, value in enumerate(digests.tolist()):
        if value:
            seen.setdefault(value, labels[rank])
    if len(seen) > 1:
        raise StartError(
            f"{what} differ between {' and '.join(seen.values())}: they run different versions "
            "of hpcrl, or their environments have different spaces",
            70,
        )


def check_fabric(link: Link, topology: Topology, deadline_s: float) -> None:
    """Ping every pair of ranks that must talk; a launch can give ranks that can't.

    Raises:
      FabricError: a peer did not answer; names it.
    """
    ping(link, topology.neighbours_of(link.rank), deadline_s)


def ping(link: Link, peers: Sequence[int], deadline_s: float, num_bytes: int = 8) -> None:
    """Exchange a message with each of `peers`, which must call with this rank among theirs.

    Raises:
      FabricError: a peer did not answer; names it.
    """
    plane = link.plane("control")
    buffers = np.zeros((len(peers), num_bytes), np.uint8)
    message = np.full(num_bytes, link.rank % 251, np.uint8)
    receivers = plane.receivers([Incoming(p, Tag.PING, buffers[i]) for i, p in enumerate(peers)])
    for index in range(len(peers)):
        receivers.start(index)
    senders = [plane.sender(peer, Tag.PING, message) for peer in peers]
    for sender in senders:
        sender.start()
    missing = set(range(len(peers)))
    waiter = link.waiter(
        lambda: (
            f"fabric check: {link.label} (rank {link.rank}) heard nothing from ranks "
            f"{sorted(peers[i] for i in missing)}"
        ),
        deadline_s,
    )
    try:
        while missing or not all(sender.done() for sender in senders):
            arrived = receivers.poll()
            missing.difference_update(arrived)
            if not arrived:
                waiter.idle()
    except DeadlineError as error:
        raise FabricError(str(error)) from None
    receivers.cancel()
