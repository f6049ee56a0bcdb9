"""Rows of one column as the compressed chunks that go to disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpcrl.recording.deflate import Compress
from hpcrl.specs import ArraySpec

Array = npt.NDArray[np.generic]


class ChunkBuffer:
    """Copies rows into one chunk's memory, which is compressed whenever it is full.

    So rows are copied once on their way to disk, into memory that is still in the processor's
    cache when it is compressed, and what waits to be written is small.

    Args:
      spec: of one row.
      chunk_rows: rows of a chunk.
      compress: one chunk to the bytes on disk.
    """

    def __init__(self, spec: ArraySpec, chunk_rows: int, compress: Compress):
        self._rows = np.zeros((chunk_rows, *spec.shape), spec.dtype)
        self._filled = 0
        self._compress = compress
        self._whole: list[bytes] = []

    def append(self, pieces: Sequence[Array]) -> None:
        """Take rows `[n, ...]` of every piece."""
        for piece in pieces:
            first = 0
            while first < len(piece):
                count = min(len(self._rows) - self._filled, len(piece) - first)
                self._rows[self._filled : self._filled + count] = piece[first : first + count]
                self._filled += count
                first += count
                if self._filled == len(self._rows):
                    self._finish()

    def take(self) -> list[bytes]:
        """Remove and return the chunks that are full."""
        whole, self._whole = self._whole, []
        return whole

    def fill_up(self) -> None:
        """End the chunk that is begun: a chunk is stored whole, its last rows are zero."""
        if self._filled:
            self._rows[self._filled :] = 0
            self._finish()

    def _finish(self) -> None:
        self._whole.append(self._compress(self._rows))
        self._filled = 0
