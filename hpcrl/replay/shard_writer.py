"""The file that a replay shard is kept in, and how it is written.

A file is a magic line, the length of a JSON header (uint64), the header, one frame per
unroll (oldest first) and an end mark. A frame is the payload's length (uint64), its CRC-32
(uint32) and the payload: one packed record whose fields the header lists with dtype and
shape, compressed with the codec that the header names. All numbers are little endian.
Nothing is pickled, so a file cannot run code.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.compression import make_codec
from hpcrl.durable import sync_directory
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.records import ReplayUnroll
from hpcrl.replay.storage import ReplayShard

MAGIC = b"hpcrl-replay\n"
SCHEMA_VERSION = 1
END_MARK = b"end\n"
LENGTH = struct.Struct("<Q")
FRAME = struct.Struct("<QI")

_UNKNOWN = 2**63 - 1
"""Stands for numbers known at the end only: as long as any of them, so the header keeps its
length."""


def record_dtype(layout: ReplayLayout) -> np.dtype[Any]:
    """Return the packed record of one unroll."""
    num_items = layout.items_per_unroll
    fields: list[tuple[str, str, tuple[int, ...]]] = [
        ("stream_id", "<i8", ()),
        ("run_id", "<i8", ()),
        ("unroll_index", "<i8", ()),
        ("priorities", "<f8", (num_items,)),
        ("eligible", "|b1", (num_items,)),
    ]
    groups = (("row", layout.rows, layout.unroll_length + 1), ("item", layout.items, num_items))
    for kind, specs, length in groups:
        for path, spec in specs.items():
            dtype = np.dtype(spec.dtype).newbyteorder("<").str
            fields.append((f"{kind}:{path}", dtype, (length, *spec.shape)))
    return np.dtype(fields)


def fill_record(record: Any, unroll: ReplayUnroll) -> None:
    """Copy an unroll into one record of `record_dtype`."""
    record["stream_id"] = unroll.stream_id
    record["run_id"] = unroll.run_id
    record["unroll_index"] = unroll.unroll_index
    record["priorities"] = unroll.priorities
    record["eligible"] = True if unroll.eligible is None else unroll.eligible
    for path, rows in unroll.rows.items():
        record[f"row:{path}"] = rows
    for path, items in unroll.items.items():
        record[f"item:{path}"] = items


class ShardWriter:
    """Writes one file under a temporary name; it gets its own name when it is whole.

    Use it as a context manager: an error, or no `finish`, leaves nothing behind.
    """

    def __init__(self, shard: ReplayShard, path: Path) -> None:
        """Open the file and write the header.

        Raises:
          OSError: it can't be written.
        """
        self._path = path
        self._partial = path.with_name(path.name + ".part")
        self._layout, self._compression = shard.layout, shard.compression
        self._capacity_unrolls = shard.capacity_unrolls
        self._codec = make_codec(shard.compression)
        self.num_unrolls = 0
        self._file = open(self._partial, "wb")  # noqa: SIM115  closed by __exit__
        self._header_bytes = self._file.write(self._header(_UNKNOWN, _UNKNOWN))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, records: NDArray[Any]) -> None:
        """Append records `[n]` of `record_dtype`, oldest first."""
        for row in records.view(np.uint8).reshape(len(records), records.itemsize):
            payload = row.data if self._codec is None else self._codec.compress(row.data)
            self._file.write(FRAME.pack(len(payload), zlib.crc32(payload)))
            self._file.write(payload)
        self.num_unrolls += len(records)

    def finish(self, next_serial: int) -> int:
        """Make the file durable and give it its name; return its bytes.

        Args:
          next_serial: number of the unroll after the last one written.
        """
        self._file.write(END_MARK)
        num_bytes = self._file.tell()
        self._file.seek(0)
        self._file.write(self._header(self.num_unrolls, next_serial - self.num_unrolls))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._path)
        sync_directory(self._path.parent)
        return num_bytes

    def _header(self, num_unrolls: int, oldest_serial: int) -> bytes:
        dtype = record_dtype(self._layout)
        header = {
            "schema_version": SCHEMA_VERSION,
            "layout": self._layout.to_json(),
            "num_unrolls": num_unrolls,
            "oldest_serial": oldest_serial,
            "capacity_unrolls": self._capacity_unrolls,
            "compression": self._compression,
            "fields": [
                [name, dtype[name].base.str, list(dtype[name].shape)] for name in dtype.names or ()
            ],
        }
        data = json.dumps(header).encode()
        if num_unrolls != _UNKNOWN:  # JSON may end in spaces
            data = data.ljust(self._header_bytes - len(MAGIC) - LENGTH.size)
        return MAGIC + LENGTH.pack(len(data)) + data


def save_shard(shard: ReplayShard, path: Path) -> int:
    """Write a shard atomically (temporary file, fsync, rename); return the file's bytes."""
    record = np.zeros(1, record_dtype(shard.layout))
    with ShardWriter(shard, path) as writer:
        for unroll in shard.unrolls():
            fill_record(record[0], unroll)
            writer.write(record)
        return writer.finish(shard.next_serial)
