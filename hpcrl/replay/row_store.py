"""The rows of one leaf: blocks of T rows, and loose rows behind them.

Row r < num_blocks * T is row r % T of block r // T; the rows after those are *loose* (the
bootstrap rows that have no block yet) and the last of them stays zero.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcrl.compression import Codec
from hpcrl.specs import ArraySpec

Array = NDArray[Any]
Int64 = NDArray[np.int64]


class RowStore(Protocol):
    """Rows of one leaf, addressed by row number."""

    @property
    def nbytes(self) -> int:
        """Bytes in use."""

    def write_block(self, block: int, rows: Array) -> None:
        """Store `rows` `[T, ...]` as one block."""

    def write_loose(self, row: int, value: Array) -> None:
        """Store one loose row `[...]`."""

    def drop_block(self, block: int) -> None:
        """Forget a block."""

    def read_block(self, block: int) -> Array:
        """Return one block `[T, ...]`; a view, or a fresh array."""

    def read_row(self, row: int) -> Array:
        """Return one row `[...]`; a view, or a fresh array."""

    def gather(self, index: Int64, out: Array) -> None:
        """Copy row `index[w, b]` to `out[w, b]`, `<int64>[W, B]` to `[W, B, ...]`."""


class RawRowStore:
    """Rows as they came, in one array that is allocated once."""

    def __init__(self, spec: ArraySpec, num_blocks: int, block_rows: int, num_loose: int) -> None:
        """Allocate room for `num_blocks` blocks of `block_rows` rows and `num_loose` rows."""
        self._block_rows = block_rows
        self._rows: Array = np.zeros((num_blocks * block_rows + num_loose, *spec.shape), spec.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._rows.nbytes

    def write_block(self, block: int, rows: Array) -> None:
        """Store `rows` `[T, ...]` as one block."""
        self._rows[block * self._block_rows : (block + 1) * self._block_rows] = rows

    def write_loose(self, row: int, value: Array) -> None:
        """Store one loose row `[...]`."""
        self._rows[row] = value

    def drop_block(self, block: int) -> None:
        """Forget a block; its place is simply overwritten later."""

    def read_block(self, block: int) -> Array:
        """Return one block `[T, ...]`, a view."""
        return self._rows[block * self._block_rows : (block + 1) * self._block_rows]

    def read_row(self, row: int) -> Array:
        """Return one row `[...]`, a view."""
        view: Array = self._rows[row]
        return view

    def gather(self, index: Int64, out: Array) -> None:
        """Copy row `index[w, b]` to `out[w, b]`."""
        # Any other mode makes numpy gather into a temporary array first.
        np.take(self._rows, index, axis=0, out=out, mode="clip")


class CompressedRowStore:
    """Blocks as compressed bytes; loose rows as they came."""

    def __init__(
        self, spec: ArraySpec, num_blocks: int, block_rows: int, num_loose: int, codec: Codec
    ) -> None:
        """Make an empty store; see `RawRowStore`."""
        self._shape = (block_rows, *spec.shape)
        self._dtype = np.dtype(spec.dtype)
        self._codec = codec
        self._blocks: list[bytes] = [b""] * num_blocks
        self._block_bytes = 0
        self._loose: Array = np.zeros((num_loose, *spec.shape), spec.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in use: compressed blocks and loose rows."""
        return self._block_bytes + self._loose.nbytes

    def write_block(self, block: int, rows: Array) -> None:
        """Store `rows` `[T, ...]` as one block."""
        self.drop_block(block)
        data = np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8)
        self._blocks[block] = self._codec.compress(data.data)
        self._block_bytes += len(self._blocks[block])

    def write_loose(self, row: int, value: Array) -> None:
        """Store one loose row `[...]`."""
        self._loose[row - self._num_block_rows] = value

    def drop_block(self, block: int) -> None:
        """Forget a block and free its bytes."""
        self._block_bytes -= len(self._blocks[block])
        self._blocks[block] = b""

    def read_block(self, block: int) -> Array:
        """Return one block `[T, ...]`, decompressed and read-only."""
        data = self._codec.decompress(self._blocks[block])
        return np.frombuffer(data, self._dtype).reshape(self._shape)

    def read_row(self, row: int) -> Array:
        """Return one row `[...]`."""
        block, offset = divmod(row, self._shape[0])
        loose = row - self._num_block_rows
        value: Array = self._loose[loose] if loose >= 0 else self.read_block(block)[offset]
        return value

    def gather(self, index: Int64, out: Array) -> None:
        """Copy row `index[w, b]` to `out[w, b]`, decompressing each needed block per column."""
        num_blocks = len(self._blocks)
        owners = np.minimum(index // self._shape[0], num_blocks)  # num_blocks: the loose rows
        for b in range(index.shape[1]):
            for owner in np.unique(owners[:, b]):
                here = np.flatnonzero(owners[:, b] == owner)
                source = self._loose if owner == num_blocks else self.read_block(int(owner))
                out[here, b] = source[index[here, b] - owner * self._shape[0]]

    @property
    def _num_block_rows(self) -> int:
        return len(self._blocks) * self._shape[0]
