"""Messages over the two pipes between a process and its environments' child process.

A message is one byte that says what it is, four that give the length of what follows (little
endian), and JSON text of that length, which may be empty. Large arrays are in shared memory.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_HEADER = struct.Struct("<cI")
_LONGEST_BYTES = 2**26

MAKE = b"m"
"""To the child: make the environments; the answer is `SPEC`."""
RESET = b"r"
"""To the child; the answer is `DONE`, with the step in shared memory."""
STEP = b"s"
"""To the child: step with the actions in shared memory; the answer is `DONE`."""
CLOSE = b"c"
"""To the child: close the environments and leave; there is no answer."""

SPEC = b"S"
DONE = b"D"
FAILED = b"F"
"""From the child: the command failed; `kind` and `message` say how."""


def send(fd: int, what: bytes, value: Any = None) -> None:
    """Write one message.

    Raises:
      OSError: nobody reads any more.
    """
    text = b"" if value is None else json.dumps(value).encode()
    rest = _HEADER.pack(what, len(text)) + text
    while rest:
        rest = rest[os.write(fd, rest) :]


def receive(fd: int) -> tuple[bytes, Any]:
    """Read one message; wait for it.

    Raises:
      EOFError: nobody writes any more.
      ValueError: what came is no message.
    """
    what, length = _HEADER.unpack(_read(fd, _HEADER.size))
    if length > _LONGEST_BYTES:
        raise ValueError(f"a message of {length} bytes: this is not the environments' pipe")
    return what, json.loads(_read(fd, length)) if length else None


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
