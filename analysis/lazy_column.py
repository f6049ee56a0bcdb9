"""A step column over all segments, read as it is indexed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.segments import Segment


class LazyColumn:
    """One step column over all segments, read as it is indexed.

    Attributes:
      shape: `[S, ...]`, S steps of all episodes.
      dtype: numpy dtype.
    """

    def __init__(self, name: str, segments: Sequence[Segment]):
        self._name = name
        self._segments = segments
        self._ends = np.cumsum([segment.num_steps for segment in segments])
        shape, self.dtype = segments[0].columns[name]
        self.shape = (int(self._ends[-1]), *shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> NDArray[Any]:
        if not isinstance(key, slice):
            row = range(len(self))[key]
            return self[row : row + 1][0]
        first, last, stride = key.indices(len(self))
        if stride < 0:
            raise ValueError(f"column {self._name}: a step of {stride} is not supported, use 1 up")
        parts = [part for _, part in self._parts(first, last)]
        if len(parts) == 1:
            return parts[0][::stride]
        rows = np.concatenate(parts) if parts else np.zeros((0, *self.shape[1:]), self.dtype)
        return rows[::stride]

    def chunks(self, rows: int = 65536) -> Iterator[NDArray[Any]]:
        """Yield the whole column in pieces of at most `rows`, in constant memory."""
        for first in range(0, len(self), rows):
            yield self[first : min(first + rows, len(self))]

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, NDArray[Any]]]:
        number = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            segment = self._segments[number]
            begin = int(self._ends[number]) - segment.num_steps
            stop = min(last, int(self._ends[number]))
            if stop > first:
                yield first, segment.read(self._name, first - begin, stop - begin)
            first, number = max(first, stop), number + 1
