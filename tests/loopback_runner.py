"""Runs a function on every rank of a loopback world, each in its own thread."""

import threading
from collections.abc import Callable
from typing import Any

from hpcrl.comm.loopback import LoopbackLink, PeerFailedError, World


def run_loopback(
    body: Callable[[LoopbackLink], Any], size: int, deadline_s: float = 60.0
) -> list[Any]:
    """Return what `body(link)` returned, by rank; the first error ends all ranks and is raised."""
    world = World(size, deadline_s)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(world.link(rank))
        except PeerFailedError:
            pass
        except BaseException as error:
            errors.append(error)
            world.fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
