"""Which stretch of a flat vector each of several servers holds."""

from __future__ import annotations

from itertools import pairwise

Bounds = tuple[int, int]
"""First element, and the one after the last."""


def shard_bounds(size: int, count: int) -> list[Bounds]:
    """Return `count` contiguous stretches that make up a vector; lengths differ by at most one.

    Raises:
      ValueError: there are fewer elements than stretches, or no stretch.
    """
    if not 1 <= count <= size:
        raise ValueError(
            f"{size} parameters can't be shared by {count} learners: each needs at least one; "
            "set topology.learners lower"
        )
    edges = [index * size // count for index in range(count + 1)]
    return list(pairwise(edges))
