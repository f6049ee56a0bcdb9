"""Pre-flight of a shard's size: bytes it will take, and whether the capacity makes sense."""

from __future__ import annotations

from hpcrl.replay.block_ring import BlockRing
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.prioritized import PrioritizedSampler
from hpcrl.replay.storage import MIN_COMPRESSED_BYTES, num_loose_rows


def replay_bytes(
    layout: ReplayLayout,
    capacity_unrolls: int,
    num_streams: int,
    compressed_bytes_limit: int | None = None,
) -> int:
    """Return the bytes that a full `ReplayShard` of this capacity takes.

    Args:
      layout: leaves and geometry.
      capacity_unrolls: blocks.
      num_streams: environments that send to the shard.
      compressed_bytes_limit: the limit on compressed rows; None counts rows at full size,
        which also bounds a compressed shard without a limit, up to the codec's overhead.
    """
    num_slots = capacity_unrolls * layout.items_per_unroll
    num_loose = num_loose_rows(num_streams) + 1
    block_bytes = layout.unroll_length * layout.row_bytes * capacity_unrolls
    loose_bytes = num_loose * layout.row_bytes
    if compressed_bytes_limit is not None:
        sizes = [spec.nbytes for spec in layout.rows.values()]
        raw_bytes = sum(size for size in sizes if size < MIN_COMPRESSED_BYTES)
        compressed_loose = num_loose * (layout.row_bytes - raw_bytes)
        block_bytes = layout.unroll_length * raw_bytes * capacity_unrolls
        loose_bytes = num_loose * raw_bytes + max(compressed_bytes_limit, compressed_loose)
    bookkeeping = PrioritizedSampler.bytes_for(num_slots) + BlockRing.bytes_for(capacity_unrolls)
    return block_bytes + loose_bytes + num_slots * layout.item_bytes + bookkeeping


def sample_bytes(layout: ReplayLayout, batch: int) -> int:
    """Return the bytes of the output buffers for samples of `batch` items."""
    rows = sum(
        (layout.prefix(path) + layout.window) * spec.nbytes for path, spec in layout.rows.items()
    )
    return batch * (rows + layout.item_bytes)


def largest_capacity(
    layout: ReplayLayout,
    num_streams: int,
    bytes_available: int,
    compressed_bytes_limit: int | None = None,
) -> int:
    """Return the largest `capacity_unrolls` that fits into `bytes_available`, 0 if none does."""
    fits, too_large = 0, 1
    while replay_bytes(layout, too_large, num_streams, compressed_bytes_limit) <= bytes_available:
        fits, too_large = too_large, 2 * too_large
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if replay_bytes(layout, middle, num_streams, compressed_bytes_limit) <= bytes_available:
            fits = middle
        else:
            too_large = middle
    return fits


def check_memory(
    layout: ReplayLayout,
    capacity_unrolls: int,
    num_streams: int,
    bytes_available: int,
    buffer_bytes: int = 0,
    compressed_bytes_limit: int | None = None,
) -> int:
    """Return the bytes that the shard needs, if they are there.

    Args:
      layout: leaves and geometry.
      capacity_unrolls: blocks.
      num_streams: environments that send to the shard.
      bytes_available: memory that this rank may use.
      buffer_bytes: further bytes that come with the shard, such as `sample_bytes`.
      compressed_bytes_limit: see `replay_bytes`.

    Raises:
      MemoryError: naming the bytes needed, the bytes available and the largest capacity.
    """
    needed = replay_bytes(layout, capacity_unrolls, num_streams, compressed_bytes_limit)
    if needed + buffer_bytes <= bytes_available:
        return needed
    fits = largest_capacity(
        layout, num_streams, bytes_available - buffer_bytes, compressed_bytes_limit
    )
    raise MemoryError(
        f"a replay shard of {capacity_unrolls} unrolls needs {needed + buffer_bytes} bytes "
        f"({(needed + buffer_bytes) / 2**30:.2f} GiB, {buffer_bytes} of them sample buffers), "
        f"but this rank has {bytes_available} bytes ({bytes_available / 2**30:.2f} GiB); "
        f"the largest capacity that fits is {fits} unrolls"
    )


def check_capacity(
    layout: ReplayLayout, capacity_unrolls: int, num_streams: int, min_size: int, batch: int
) -> None:
    """Raise ValueError unless a full shard can hold `min_size` items plus a batch.

    Every stream may cost `num_predecessors` unrolls of items, because its oldest stored
    unrolls miss the rows before them.
    """
    kept = num_streams * layout.num_predecessors
    usable = (capacity_unrolls - kept) * layout.items_per_unroll
    if usable < min_size + batch:
        needed = kept - (-(min_size + batch) // layout.items_per_unroll)
        raise ValueError(
            f"replay capacity of {capacity_unrolls} unrolls per learner leaves {max(usable, 0)} "
            f"items to sample (up to {kept} unrolls only serve as burn-in of others), less than "
            f"min_size {min_size} + batch {batch}: training would never start; "
            f"needs at least {needed} unrolls"
        )
