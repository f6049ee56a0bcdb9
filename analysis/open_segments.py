"""A segment that has a writer, or whose writer was killed, shown to HDF5 as a closed file.

HDF5 opens such a file in its single-writer mode only, and in that mode it takes what is missing
at the end for something that the writer is about to write: it waits for metadata without end,
and reads zeros as data. Shown as a closed file of just the bytes that are there, whatever refers
to other bytes is an error, at once.
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import h5py

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUPERBLOCK = struct.Struct("<8s4B4QI")
"""Version 3: signature, version, bytes of an offset and of a length, flags of who has the file
open, addresses of the base, an extension, the end of the file and the root group; a checksum."""


class ClosedView(io.RawIOBase):
    """The bytes of a file as they are now, its superblock as if nobody had it open.

    What is appended later is not shown. The file itself stays as it is.

    Raises:
      OSError: it can't be read, or has no superblock of version 3 with 8-byte offsets.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._file = path.open("rb", buffering=0)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._head = closed_superblock(self._file.read(_SUPERBLOCK.size), self.size)
        except OSError:
            self._file.close()
            raise

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte and return its number."""
        if whence == os.SEEK_END:
            return self._file.seek(self.size + offset)
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill all of `buffer`, or raise OSError: HDF5 doesn't look at the count."""
        place, done = self._file.tell(), 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])
            if not count:
                raise OSError(f"{self._file.name} has become shorter than {self.size} bytes")
            done += count
        shown = self._head[place : place + done]
        buffer[: len(shown)] = shown
        return done

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()


def closed_superblock(head: bytes, size: int) -> bytes:
    """Return a superblock without its flags, of a file of `size` bytes.

    Raises:
      OSError: it is none of version 3 with 8-byte offsets.
    """
    if len(head) < _SUPERBLOCK.size:
        raise OSError(f"its {len(head)} bytes are fewer than the head of an HDF5 file")
    fields = list(_SUPERBLOCK.unpack(head))
    if fields[:4] != [_SIGNATURE, 3, 8, 8] or fields[-1] != checksum(head[:-4]):
        raise OSError("it doesn't begin as an HDF5 file of a recording does")
    fields[4], fields[7] = 0, size
    unsigned = _SUPERBLOCK.pack(*fields)[:-4]
    return unsigned + struct.pack("<I", checksum(unsigned))


def checksum(data: bytes) -> int:
    """Return HDF5's checksum of metadata, Bob Jenkins' lookup3, of whole 32-bit words."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    a = b = c = 0xDEADBEEF + len(data)
    for first in range(0, len(words) - 3, 3):
        a, b, c = _mix(a + words[first], b + words[first + 1], c + words[first + 2])
    rest = (*words[(len(words) - 1) // 3 * 3 :], 0, 0)
    return _final(a + rest[0], b + rest[1], c + rest[2])


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        a = (a - c) ^ _rotated(c, bits)
        a, b, c = b, b + c, a  # the three take turns
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - _rotated(b, bits)
        a, b, c = b, c, a
    return b & 0xFFFFFFFF


def _rotated(word: int, bits: int) -> int:
    word &= 0xFFFFFFFF
    return word << bits | word >> (32 - bits)


def open_view(path: Path) -> h5py.File:
    """Open a file that has a writer, or had one that was killed, for reading.

    Raises:
      OSError: it can't be read.
    """
    view = ClosedView(path)
    try:
        return h5py.File(view, "r")
    except OSError:
        view.close()
        raise
