"""The end of a job: codes go up the tree of those who serve each other, the greatest comes down."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcrl.comm.link import Group, Incoming, wait_until
from hpcrl.comm.wire import Tag, code_layout
from hpcrl.job import Seat
from hpcrl.timing import Waiter


def leave(
    seat: Seat, code: int, learners: Group | None = None, serve: Callable[[], None] = lambda: None
) -> int:
    """Wait until every rank that is alive has finished; return the greatest of their codes.

    A rank that died has no code, which is why this is no collective over all ranks.

    Args:
      seat: of this rank, which calls once.
      code: of this rank.
      learners: the group of all learners, on a learner.
      serve: called while this rank waits.
    """
    link, parent = seat.link, seat.topology.parent_of[seat.rank]
    plane, layout = link.plane("control"), code_layout()
    waiter = link.waiter(
        lambda: f"{link.label} (rank {link.rank}) waited for the end of all other ranks"
    )
    children = [r for r, above in enumerate(seat.topology.parent_of) if above == link.rank]
    buffers = layout.buffer(len(children))
    codes = layout.views(buffers)["code"]
    below = plane.receivers([Incoming(r, Tag.LEAVE, buffers[i]) for i, r in enumerate(children)])
    for index in range(len(children)):
        below.start(index)
    missing = set(range(len(children)))
    while missing:
        finished = below.poll()
        code = max([code, *(int(codes[index]) for index in finished)])
        missing.difference_update(finished)
        missing = {index for index in missing if children[index] not in link.lost_ranks}
        serve()
        if missing:
            waiter.idle()
    below.cancel()
    if learners is not None:
        code = _greatest(learners, code, waiter, serve)
    own = layout.buffer()
    if parent is not None:
        answer = plane.receivers([Incoming(parent, Tag.LEAVE, own)])
        answer.start(0)
        mine = layout.buffer()
        layout.views(mine)["code"][...] = code
        up = plane.sender(parent, Tag.LEAVE, mine)
        up.start()
        wait_until(lambda: bool(answer.poll()), waiter)
        wait_until(up.done, waiter)
        answer.cancel()
        code = int(layout.views(own)["code"])
    layout.views(own)["code"][...] = code
    down = {rank: plane.sender(rank, Tag.LEAVE, own) for rank in children}
    for rank in down.keys() - link.lost_ranks:
        down[rank].start()
    while not all(down[rank].done() for rank in down.keys() - link.lost_ranks):
        waiter.idle()
    return code


def _greatest(learners: Group, code: int, waiter: Waiter, serve: Callable[[], None]) -> int:
    gathering = learners.start_allgather(np.array([code], np.int64))
    while not gathering.done():
        serve()
        waiter.idle()
    return int(gathering.result.max())
