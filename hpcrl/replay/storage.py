"""One learner's shard of a prioritized replay: rows stored once, sequences sampled.

    add(unroll)   block ring (where) → row stores (data) → sampler (priorities)
    sample(B)     sampler (which) → block ring (which rows) → row stores (gather)

The shard belongs to one rank and one thread, and communicates with nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcrl.checks import check_dtype, check_shape
from hpcrl.compression import make_codec
from hpcrl.replay.block_ring import BlockRing
from hpcrl.replay.layout import START, ReplayLayout
from hpcrl.replay.prioritized import PrioritizedSampler
from hpcrl.replay.records import ReplayCounters, ReplaySample, ReplayUnroll, SampleBuffers
from hpcrl.replay.row_store import CompressedRowStore, RawRowStore, RowStore

Array = NDArray[Any]
Int64 = NDArray[np.int64]

MIN_COMPRESSED_BYTES = 256
"""Row leaves smaller than this are never compressed."""


class ReplayShard:
    """A ring of unrolls with prioritized items. See `ReplayLayout` for the geometry."""

    def __init__(
        self,
        layout: ReplayLayout,
        capacity_unrolls: int,
        num_streams: int,
        alpha: float,
        min_priority: float = 1e-6,
        compression: str = "none",
        compressed_bytes_limit: int | None = None,
    ) -> None:
        """Allocate the shard; call `memory.check_memory` first.

        Args:
          layout: leaves and geometry.
          capacity_unrolls: blocks; the oldest unroll makes room for the newest.
          num_streams: environments that send to this shard (sizes the room for bootstrap
            rows; more of them still work, at the price of an item each).
          alpha: priority exponent.
          min_priority: floor of every priority.
          compression: "none", "zlib" or "lz4", for row leaves of 256 bytes and more.
          compressed_bytes_limit: with compression, the oldest unrolls are also given up when
            compressed rows take more bytes than this.
        """
        self.layout = layout
        self.capacity_unrolls = capacity_unrolls
        self.compression = compression
        self._bytes_limit = compressed_bytes_limit
        self._ring = BlockRing(layout, capacity_unrolls, num_loose_rows(num_streams))
        num_slots = capacity_unrolls * layout.items_per_unroll
        self._sampler = PrioritizedSampler(num_slots, alpha, min_priority)
        self._rows = self._make_row_stores(num_loose_rows(num_streams) + 1)
        self._items: dict[str, Array] = {
            path: np.zeros((num_slots, *spec.shape), spec.dtype)
            for path, spec in layout.items.items()
        }
        self._num_inserted = 0
        self._num_evicted = 0
        self._num_incomplete = 0
        self._num_sampled = 0

    @property
    def sampler(self) -> PrioritizedSampler:
        """The priorities, to read mass, size and extremes from."""
        return self._sampler

    @property
    def size(self) -> int:
        """Items that can be sampled."""
        return self._sampler.size

    @property
    def num_unrolls(self) -> int:
        """Unrolls stored, with those kept only for their successors' sake."""
        return self._ring.num_live

    @property
    def num_stored_rows(self) -> int:
        """Distinct rows stored."""
        return self._ring.num_stored_rows

    @property
    def nbytes(self) -> int:
        """Bytes allocated or, for compressed leaves, in use."""
        row_bytes = sum(store.nbytes for store in self._rows.values())
        item_bytes = sum(array.nbytes for array in self._items.values())
        return row_bytes + item_bytes + self._sampler.nbytes + self._ring.nbytes

    @property
    def counters(self) -> ReplayCounters:
        """What happened so far."""
        return ReplayCounters(
            inserted_unrolls=self._num_inserted,
            evicted_unrolls=self._num_evicted,
            incomplete_items=self._num_incomplete,
            gaps=self._ring.num_gaps,
            reclaimed_rows=self._ring.num_reclaimed_rows,
            sampled_items=self._num_sampled,
            stale_updates=self._sampler.num_stale,
        )

    def add(self, unroll: ReplayUnroll) -> tuple[Int64, Int64]:
        """Store an unroll, giving up the oldest one if there is no room.

        Returns:
          `(slots, generations)` of its items, each `<int64>[I]`.

        Raises:
          ValueError or TypeError: a leaf is missing, or its shape or dtype is not the
            layout's, or a priority is not a finite number of at least 0. Nothing was stored.
        """
        self._check_unroll(unroll)
        if self._ring.num_live == self.capacity_unrolls:
            self._evict_oldest()
        place = self._ring.append(unroll.stream_id, unroll.run_id, unroll.unroll_index)
        self._sampler.remove(place.lost_slots)
        for path, store in self._rows.items():
            store.write_block(place.block, unroll.rows[path][:-1])
            store.write_loose(place.loose_row, unroll.rows[path][-1])
        usable = place.complete
        if unroll.eligible is not None:
            usable = usable & unroll.eligible
        slots, generations = self._sampler.add(unroll.priorities, usable)
        for path, array in self._items.items():
            array[slots] = unroll.items[path]
        self._num_inserted += 1
        self._num_incomplete += int(np.count_nonzero(~usable))
        self._enforce_bytes_limit()
        return slots, generations

    def make_buffers(self, batch: int) -> SampleBuffers:
        """Allocate output arrays for samples of `batch` items."""
        layout = self.layout
        return SampleBuffers(
            rows={
                path: np.empty((layout.prefix(path) + layout.window, batch, *s.shape), s.dtype)
                for path, s in layout.rows.items()
            },
            items={path: np.empty((batch, *s.shape), s.dtype) for path, s in layout.items.items()},
        )

    def sample(
        self,
        batch: int,
        rng: np.random.Generator,
        out: SampleBuffers | None = None,
        replacement: bool = True,
        stratified: bool = False,
    ) -> ReplaySample:
        """Draw `batch` items and gather their rows.

        Args:
          batch: number of items.
          rng: source of randomness.
          out: arrays from `make_buffers(batch)`, overwritten; None allocates new ones.
          replacement: see `PrioritizedSampler.sample`.
          stratified: see `PrioritizedSampler.sample`.

        Raises:
          ValueError: there are not enough items.
        """
        draw = self._sampler.sample(batch, rng, replacement, stratified)
        self._num_sampled += batch
        buffers = self.make_buffers(batch) if out is None else out
        index = self._ring.row_index(draw.slots)
        deepest = self.layout.stack_prefix
        for path, store in self._rows.items():
            store.gather(index[deepest - self.layout.prefix(path) :], buffers.rows[path])
        for path, array in self._items.items():
            np.take(array, draw.slots, axis=0, out=buffers.items[path], mode="clip")
        per_item = self.layout.items_per_unroll
        return ReplaySample(
            rows={path: rows[self.layout.prefix(path) :] for path, rows in buffers.rows.items()},
            prefixes=self._masked_prefixes(buffers.rows),
            valid=index[deepest:] != self._ring.zero_row,
            items=buffers.items,
            slots=draw.slots,
            generations=draw.generations,
            probability=draw.probability,
            age_unrolls=self._ring.next_serial - 1 - draw.generations // per_item,
            priority_age_draws=self._sampler.priority_age_draws(draw.slots),
        )

    def update_priorities(
        self, slots: ArrayLike, generations: ArrayLike, priorities: ArrayLike
    ) -> int:
        """Write priorities back; see `PrioritizedSampler.update`. Returns the stale ones."""
        return self._sampler.update(slots, generations, priorities)

    def start_at(self, unroll_serial: int) -> None:
        """Let the next unroll be number `unroll_serial`; only for a shard never used."""
        self._ring.start_at(unroll_serial)
        self._sampler.start_at(unroll_serial * self.layout.items_per_unroll)

    @property
    def oldest_serial(self) -> int:
        """Number of the oldest stored unroll, counted from the first ever added."""
        return self._ring.oldest_serial

    @property
    def next_serial(self) -> int:
        """Number of the next unroll to be added."""
        return self._ring.next_serial

    def unrolls(self) -> Iterator[ReplayUnroll]:
        """Iterate over the stored unrolls, oldest first; see `unroll`."""
        for serial in range(self.oldest_serial, self.next_serial):
            yield self.unroll(serial)

    def unroll(self, serial: int) -> ReplayUnroll:
        """Return a stored unroll by its number, ready to be added elsewhere.

        Items that can no longer be sampled come with `eligible` false. The arrays may be
        views: use them before the shard changes.
        """
        if not self.oldest_serial <= serial < self.next_serial:
            raise ValueError(f"unroll {serial} is not stored")
        ring = self._ring
        per_item = self.layout.items_per_unroll
        block = serial % self.capacity_unrolls
        slots = block * per_item + np.arange(per_item)
        bootstrap = int(ring.bootstrap_row[block])
        return ReplayUnroll(
            stream_id=int(ring.stream_id[block]),
            run_id=int(ring.run_id[block]),
            unroll_index=int(ring.unroll_index[block]),
            rows={
                path: _with_last(store, block, bootstrap if bootstrap >= 0 else None)
                for path, store in self._rows.items()
            },
            items={path: array[slots] for path, array in self._items.items()},
            priorities=self._sampler.priority(slots),
            eligible=self._sampler.is_live(slots),
        )

    def check_valid(self) -> tuple[bool, str]:
        """Return whether every invariant holds, and if not, which one is broken."""
        for name, part in (("sampler", self._sampler), ("ring", self._ring)):
            ok, why = part.check_valid()
            if not ok:
                return False, f"{name}: {why}"
        slots = np.flatnonzero(self._sampler.is_live(np.arange(self._sampler.capacity)))
        per_item = self.layout.items_per_unroll
        blocks = slots // per_item
        if not np.isin(blocks, self._ring.live_blocks()).all():
            return False, "an item of an evicted unroll can be sampled"
        generations = self._ring.serial(blocks) * per_item + slots % per_item
        if np.any(self._sampler.generation(slots) != generations):
            return False, "an item's generation is not that of its unroll"
        rows = self._ring.row_index(slots)[-(self.layout.sequence_length + 1) :]
        if np.any(rows == self._ring.zero_row):
            return False, "an item that can be sampled has a loss row that is not stored"
        return True, ""

    def _make_row_stores(self, num_loose: int) -> dict[str, RowStore]:
        codec = make_codec(self.compression)
        stores: dict[str, RowStore] = {}
        sizes = self.capacity_unrolls, self.layout.unroll_length, num_loose
        for path, spec in self.layout.rows.items():
            if codec is None or spec.nbytes < MIN_COMPRESSED_BYTES:
                stores[path] = RawRowStore(spec, *sizes)
            else:
                stores[path] = CompressedRowStore(spec, *sizes, codec)
        return stores

    def _masked_prefixes(self, rows: dict[str, Array]) -> dict[str, Array]:
        """Zero the prefix frames of earlier episodes; return the prefixes of stacked leaves."""
        deepest = self.layout.stack_prefix
        prefixes = {path: rows[path][: self.layout.prefix(path)] for path in self.layout.stacks}
        if deepest > 1:
            # Row i is hidden if an episode started after it and before the window: [K-2, B].
            starts = rows[START][1:deepest]
            hidden = np.logical_or.accumulate(starts[::-1], axis=0)[::-1]
            for prefix in prefixes.values():
                if len(prefix) > 1:
                    prefix[:-1][hidden[deepest - len(prefix) :]] = 0
        return prefixes

    def _check_unroll(self, unroll: ReplayUnroll) -> None:
        layout = self.layout
        groups = (
            ("row", layout.rows, unroll.rows, layout.unroll_length + 1),
            ("item", layout.items, unroll.items, layout.items_per_unroll),
        )
        for kind, specs, leaves, length in groups:
            if specs.keys() != leaves.keys():
                raise ValueError(f"{kind} leaves {sorted(leaves)}, expected {sorted(specs)}")
            for path, spec in specs.items():
                check_shape(f"{kind} leaf {path!r}", leaves[path], length, *spec.shape)
                check_dtype(f"{kind} leaf {path!r}", leaves[path], np.dtype(spec.dtype))
        check_shape("priorities", np.asarray(unroll.priorities), layout.items_per_unroll)
        if unroll.eligible is not None:
            check_shape("eligible", unroll.eligible, layout.items_per_unroll)
        if unroll.unroll_index < 0:
            raise ValueError(f"unroll_index {unroll.unroll_index} must be at least 0")
        self._sampler.check_priorities(unroll.priorities)

    def _evict_oldest(self) -> None:
        block, lost_slots = self._ring.evict_oldest()
        self._sampler.remove(lost_slots)
        for store in self._rows.values():
            store.drop_block(block)
        self._num_evicted += 1

    def _enforce_bytes_limit(self) -> None:
        if self._bytes_limit is None:
            return
        compressed = [s for s in self._rows.values() if isinstance(s, CompressedRowStore)]
        while sum(s.nbytes for s in compressed) > self._bytes_limit and self._ring.num_live > 1:
            self._evict_oldest()


def num_loose_rows(num_streams: int) -> int:
    """Room for bootstrap rows: two per stream, so that a run's last one outlives a restart."""
    return 2 * num_streams


def _with_last(store: RowStore, block: int, last_row: int | None) -> Array:
    """Return a block's rows and the bootstrap row `[T+1, ...]`; zeros where it was given up."""
    rows = store.read_block(block)
    last = np.zeros_like(rows[0]) if last_row is None else store.read_row(last_row)
    return np.concatenate([rows, last[None]])
