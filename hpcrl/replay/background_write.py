"""Writes a shard beside training: its owner copies a little at a time, a thread writes.

The shard goes on while it is copied. Oldest unrolls are copied first, and oldest ones are
given up first for newer ones, so whatever is given up before its turn is left out of the
file, as if the shard had held fewer. This takes no copy of the shard in memory, only a few
chunks on their way to the disk.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.shard_writer import ShardWriter, fill_record, record_dtype
from hpcrl.replay.storage import ReplayShard

_CHUNK_BYTES = 1 << 22
_QUEUED_CHUNKS = 3
_MAX_CHUNK_RECORDS = 4096


def background_bytes(layout: ReplayLayout) -> int:
    """Return the most memory that a write takes: chunks waiting, one filled, one written."""
    record_bytes = record_dtype(layout).itemsize
    return (_QUEUED_CHUNKS + 2) * max(_CHUNK_BYTES, record_bytes)


class BackgroundWrite:
    """One write of the unrolls that a shard holds now.

    Everything but the thread's own work is called by the rank that owns the shard.

    Attributes:
      num_bytes: of the file, once finished.
      num_unrolls: written so far.
      missed_unrolls: given up before they were copied.
      write_s: seconds from the beginning to the end.
      error: why there is no file, or None.
    """

    def __init__(self, shard: ReplayShard, path: Path) -> None:
        """Begin; nothing is copied yet."""
        self.num_bytes = self.num_unrolls = self.missed_unrolls = 0
        self.write_s = 0.0
        self.error: str | None = None
        self._shard, self._path = shard, path
        self._dtype = record_dtype(shard.layout)
        records = min(max(_CHUNK_BYTES // self._dtype.itemsize, 1), _MAX_CHUNK_RECORDS)
        self._chunk_shape = (records,)
        self._chunk, self._filled = np.zeros(self._chunk_shape, self._dtype), 0
        self._next, self._end = shard.oldest_serial, shard.next_serial
        self._chunks: queue.Queue[tuple[NDArray[Any], bool]] = queue.Queue(_QUEUED_CHUNKS)
        self._copied = self._cancelled = False
        # A daemon: what a dying process cuts off is a file under a temporary name.
        self._thread = threading.Thread(target=self._write, name="replay", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether the file is durable, or `error` says why not."""
        return not self._thread.is_alive()

    def feed(self, seconds: float) -> None:
        """Copy for at most about `seconds`, and no more than the thread has room for."""
        end_s = time.perf_counter() + seconds
        while not (self._copied or self.finished or self._chunks.full()):
            self._fill_chunk(end_s)
            if time.perf_counter() >= end_s:
                return

    def wait(self) -> None:
        """Copy all that is left and return when the write has finished."""
        while not self.finished:
            self.feed(1.0)
            self._thread.join(0.005)

    def cancel(self) -> None:
        """End without a file."""
        self._cancelled = True
        while not self.finished:
            if not self._chunks.full():
                self._chunks.put((self._chunk[:0], True))
            self._thread.join(0.005)

    def _fill_chunk(self, end_s: float) -> None:
        """Copy unrolls into the chunk; hand it over when it is full or the last."""
        while self._filled < len(self._chunk):
            serial = max(self._next, self._shard.oldest_serial)
            self.missed_unrolls += min(serial, self._end) - self._next
            if serial >= self._end:
                self._copied = True
                break
            fill_record(self._chunk[self._filled], self._shard.unroll(serial))
            self._filled += 1
            self._next = serial + 1
            if time.perf_counter() >= end_s:
                break
        if self._copied or self._filled == len(self._chunk):
            self._chunks.put((self._chunk[: self._filled], self._copied))
            self._chunk, self._filled = np.zeros(self._chunk_shape, self._dtype), 0

    def _write(self) -> None:
        begin_s = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with ShardWriter(self._shard, self._path) as writer:
                last = False
                while not last:
                    records, last = self._chunks.get()
                    if self._cancelled:
                        self.error = "cancelled"
                        return
                    writer.write(records)
                    self.num_unrolls += len(records)
                self.num_bytes = writer.finish(self._end)
        except Exception as error:  # handed to the owner
            self.error = getattr(error, "strerror", None) or repr(error)
        finally:
            self.write_s = time.monotonic() - begin_s
