"""Which block follows which, and which rows a sampled item consists of. Holds no data.

Blocks live in a ring, oldest overwritten first, over all environments of a shard. The
unrolls of one run of one environment (a *stream* and its *run id*, new after every restart)
form a chain: each block knows its predecessor and its successor, and the newest block of a
chain has its bootstrap row as a loose row until the successor arrives and brings that row as
its own first one.

Decisions at the ends of a chain:

- Unroll 0 of a run has no predecessor and needs none: the rows before it never existed.
  They are padding, marked as not valid.
- When a block is evicted, items of its successors that need its rows can no longer be
  sampled. Their own rows stay until their turn comes, because the next unroll's items need
  them. So every chain that reaches beyond the oldest block costs one unroll of items.
- An unroll whose predecessor is missing (a gap in the unroll index) is stored, but those of
  its items that need the missing rows are never sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.replay.layout import ReplayLayout

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

NONE = -1
RUN_START = -1
LOST = -2


class Placement(NamedTuple):
    """Where a new unroll goes.

    Attributes:
      block: its block.
      loose_row: row number for its bootstrap row.
      complete: `<bool>[I]`, items of which every real row is there.
      lost_slots: `<int64>[n]`, items of other blocks that must not be sampled any more.
    """

    block: int
    loose_row: int
    complete: Bool
    lost_slots: Int64


class BlockRing:
    """Bookkeeping of `num_blocks` blocks and `num_loose` loose rows (plus one zero row).

    Slots number the items: item m of a block is slot block * I + m.
    """

    def __init__(self, layout: ReplayLayout, num_blocks: int, num_loose: int) -> None:
        """Make an empty ring."""
        if num_blocks <= layout.num_predecessors or num_loose < 1:
            raise ValueError(
                f"replay of {num_blocks} unrolls and {num_loose} streams is too small: one item "
                f"spans {layout.num_predecessors + 1} unrolls"
            )
        self.num_blocks = num_blocks
        self.first_loose_row = num_blocks * layout.unroll_length
        self.zero_row = self.first_loose_row + num_loose
        self.next_serial = 0
        self.oldest_serial = 0
        self.num_gaps = 0
        self.num_reclaimed_rows = 0
        self.stream_id = np.full(num_blocks, NONE, dtype=np.int64)
        self.run_id = np.zeros(num_blocks, dtype=np.int64)
        self.unroll_index = np.zeros(num_blocks, dtype=np.int64)
        self.bootstrap_row = np.full(num_blocks, NONE, dtype=np.int64)
        self._predecessor = np.full(num_blocks, RUN_START, dtype=np.int64)
        self._successor = np.full(num_blocks, NONE, dtype=np.int64)
        self._newest: dict[tuple[int, int], int] = {}
        self._free_rows = list(range(self.first_loose_row, self.zero_row))
        self._prepare_geometry(layout)

    @staticmethod
    def bytes_for(num_blocks: int) -> int:
        """Bytes of the arrays that a ring of this size allocates."""
        return 6 * 8 * num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.stream_id, self.run_id, self.unroll_index, self.bootstrap_row)
        return sum(a.nbytes for a in (*arrays, self._predecessor, self._successor))

    @property
    def num_live(self) -> int:
        """Number of stored unrolls."""
        return self.next_serial - self.oldest_serial

    @property
    def num_stored_rows(self) -> int:
        """Distinct rows that are stored."""
        num_loose = self.zero_row - self.first_loose_row
        return self.num_live * self._rows_per_block + num_loose - len(self._free_rows)

    def live_blocks(self) -> Int64:
        """Stored blocks `<int64>[n]`, oldest first."""
        return np.arange(self.oldest_serial, self.next_serial, dtype=np.int64) % self.num_blocks

    def serial(self, blocks: Int64) -> Int64:
        """Number of the unroll that each live block holds, counted from the first ever."""
        return self.oldest_serial + (blocks - self.oldest_serial) % self.num_blocks

    def start_at(self, serial: int) -> None:
        """Let the next unroll be number `serial`; only while no unroll was ever added."""
        if self.next_serial:
            raise ValueError(f"{self.next_serial} unrolls were added already")
        self.next_serial = self.oldest_serial = serial

    def append(self, stream_id: int, run_id: int, unroll_index: int) -> Placement:
        """Make room for the next unroll; the oldest block must have been evicted if full.

        Args:
          stream_id: the environment.
          run_id: changes whenever the environment was restarted.
          unroll_index: 0 for the first unroll of a run, then counting up by one.

        Returns:
          Its place.
        """
        if self.num_live == self.num_blocks:
            raise ValueError(f"all {self.num_blocks} blocks are in use")
        block = self.next_serial % self.num_blocks
        head = self._newest.get((stream_id, run_id), NONE)
        lost_slots = np.empty(0, dtype=np.int64)
        follows = head != NONE and self.unroll_index[head] == unroll_index - 1
        if follows:
            loose_row = int(self.bootstrap_row[head])
            self.bootstrap_row[head] = block * self._rows_per_block
            self._successor[head] = block
            self._predecessor[block] = head
        else:
            loose_row = NONE
            self._predecessor[block] = RUN_START if unroll_index == 0 else LOST
            self.num_gaps += unroll_index != 0
        if loose_row == NONE:
            loose_row, lost_slots = self._take_loose_row()
        self.stream_id[block], self.run_id[block] = stream_id, run_id
        self.unroll_index[block] = unroll_index
        self.bootstrap_row[block] = loose_row
        self._successor[block] = NONE
        self._newest[stream_id, run_id] = block
        self.next_serial += 1
        return Placement(block, loose_row, self._complete_items(block), lost_slots)

    def evict_oldest(self) -> tuple[int, Int64]:
        """Free the oldest block.

        Returns:
          The block, and the slots `<int64>[n]` whose items must not be sampled any more: its
          own and those of its successors that need its rows.
        """
        block = self.oldest_serial % self.num_blocks
        lost = [self._slots(block)]
        successor = int(self._successor[block])
        if successor != NONE:
            self._predecessor[successor] = LOST
        distance = 1
        while successor != NONE and distance <= self._num_predecessors:
            lost.append(self._slots(successor)[self._reach >= distance])
            successor = int(self._successor[successor])
            distance += 1
        if self.bootstrap_row[block] >= self.first_loose_row:
            self._free_rows.append(int(self.bootstrap_row[block]))
        key = int(self.stream_id[block]), int(self.run_id[block])
        if self._newest[key] == block:
            del self._newest[key]
        self.stream_id[block] = NONE
        self.bootstrap_row[block] = NONE
        self.oldest_serial += 1
        return block, np.concatenate(lost)

    def row_index(self, slots: Int64) -> Int64:
        """Return the row numbers of items, `<int64>[stack_prefix + window, B]`.

        Rows that never existed (before a run's first) give the number of the zero row.
        """
        blocks, items = np.divmod(slots, self._items_per_block)
        columns = [self.bootstrap_row.take(blocks), blocks * self._rows_per_block]
        for _ in range(self._num_predecessors):
            alive = blocks >= 0
            blocks = np.where(alive, self._predecessor.take(blocks, mode="clip"), RUN_START)
            columns.append(np.where(blocks >= 0, blocks * self._rows_per_block, NONE))
        base = np.stack(columns)  # first row of each block, [D+2, B]; column 1 is the own block
        first_rows = base[self._depth[:, items], np.arange(len(slots))]
        return np.where(first_rows == NONE, self.zero_row, first_rows + self._offset[:, items])

    def check_valid(self) -> tuple[bool, str]:
        """Return whether every invariant holds, and if not, which one is broken."""
        live = self.live_blocks()
        if not 0 <= self.num_live <= self.num_blocks:
            return False, f"{self.num_live} live blocks of {self.num_blocks}"
        loose = [row for row in self.bootstrap_row[live] if row >= self.first_loose_row]
        if sorted(loose + self._free_rows) != list(range(self.first_loose_row, self.zero_row)):
            return False, "a loose row is used twice or was lost"
        for block in live:
            ok, why = self._check_links(int(block))
            if not ok:
                return False, f"block {block}: {why}"
        heads = {int(block) for block in live if self._successor[block] == NONE}
        if not set(self._newest.values()) <= heads:
            return False, "the newest block of a run has a successor or is not live"
        return True, ""

    def _check_links(self, block: int) -> tuple[bool, str]:
        predecessor, successor = int(self._predecessor[block]), int(self._successor[block])
        serial = self.serial(np.array([block, max(predecessor, 0), max(successor, 0)]))
        same_run = [self.stream_id, self.run_id]
        if predecessor >= 0:
            if self._successor[predecessor] != block or serial[1] >= serial[0]:
                return False, f"its predecessor {predecessor} does not lead to it"
            if any(array[predecessor] != array[block] for array in same_run):
                return False, f"its predecessor {predecessor} is of another run"
            if self.unroll_index[predecessor] != self.unroll_index[block] - 1:
                return False, f"its predecessor {predecessor} is not the unroll before it"
        if predecessor == RUN_START and self.unroll_index[block] != 0:
            return False, "it is taken for the start of a run"
        if successor >= 0:
            if self._predecessor[successor] != block or serial[2] <= serial[0]:
                return False, f"its successor {successor} does not lead back"
            if self.bootstrap_row[block] != successor * self._rows_per_block:
                return False, "its bootstrap row is not its successor's first row"
        elif NONE != self.bootstrap_row[block] < self.first_loose_row:
            return False, "it has no successor, but its bootstrap row is not a loose row"
        return True, ""

    def _prepare_geometry(self, layout: ReplayLayout) -> None:
        self._rows_per_block = layout.unroll_length
        self._items_per_block = layout.items_per_unroll
        self._num_predecessors = layout.num_predecessors
        self._loss_start = layout.loss_start
        # Blocks before its own that an item's rows reach back to, <int64>[I].
        self._reach = np.maximum(0, -(layout.first_position // layout.unroll_length))
        num_rows = layout.stack_prefix + layout.window
        positions = layout.first_position + np.arange(num_rows)[:, None]  # [rows, I]
        self._depth = 1 - positions // layout.unroll_length
        self._offset = positions % layout.unroll_length

    def _slots(self, block: int) -> Int64:
        return block * self._items_per_block + np.arange(self._items_per_block)

    def _complete_items(self, block: int) -> Bool:
        available = 0
        root = int(self._predecessor[block])
        while root >= 0 and available < self._num_predecessors:
            available += 1
            root = int(self._predecessor[root])
        complete = self._reach <= available
        if root == RUN_START:
            # Burn-in and stack may reach before the run, its loss rows may not.
            complete |= self._loss_start >= -available * self._rows_per_block
        return complete

    def _take_loose_row(self) -> tuple[int, Int64]:
        """Return a free loose row; if there is none, that of the oldest block that has one.

        The item that ends with a reclaimed row cannot be sampled any more.
        """
        if self._free_rows:
            return self._free_rows.pop(), np.empty(0, dtype=np.int64)
        live = self.live_blocks()
        owner = int(live[np.argmax(self.bootstrap_row[live] >= self.first_loose_row)])
        row = int(self.bootstrap_row[owner])
        self.bootstrap_row[owner] = NONE
        self.num_reclaimed_rows += 1
        return row, self._slots(owner)[-1:]
