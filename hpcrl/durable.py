"""Files that are whole or absent, whatever moment the process is killed at."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that can't sync a directory."""
_SYNC_BYTES = 2**26


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; file systems that can't do it are let off."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path, advance: Callable[[], None] = lambda: None) -> None:
    """Make the contents of a file that was written by someone else durable.

    Args:
      path: of the file.
      advance: called after each part, so that a slow disk can be told from one that hangs.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        if size > _SYNC_BYTES and (memory := _mapped(descriptor, size)):
            with memory:
                for start in range(0, size, _SYNC_BYTES):
                    memory.flush(start, min(_SYNC_BYTES, size - start))
                    advance()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> mmap.mmap | None:
    """The file in memory, None on a file system that can't do it."""
    try:
        return mmap.mmap(descriptor, size)
    except OSError:
        return None


def write_synced(path: Path, data: bytes | str) -> None:
    """Write a file in place and make its contents durable (its name may still be lost)."""
    with path.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace a file; a reader or a crash sees the old contents or the new, never a part.

    Hazard: one writer per path, since the temporary name is fixed (kills leave no litter).

    Raises:
      OSError: the old file is untouched.
    """
    partial = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(partial, data)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def json_text(data: Any, indent: int | None = None) -> str:
    """Return strict JSON: NaN and infinities become null, numpy scalars become numbers."""
    return json.dumps(_strict(data), indent=indent, allow_nan=False)


def _strict(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    if hasattr(data, "item"):
        data = data.item()
    return None if isinstance(data, float) and not math.isfinite(data) else data


def reason(error: Exception) -> str:
    """Return the operating system's words for an error, such as `No space left on device`."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
