"""Optional lossless compression of stored rows and of step messages."""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CODECS = ("none", "zlib", "lz4")


@dataclass(frozen=True)
class Codec:
    """A pair of inverse functions."""

    name: str
    compress: Callable[[memoryview], bytes]
    decompress: Callable[[bytes | memoryview], bytes]


def available_codecs() -> list[str]:
    """Return the codec names that work in this installation."""
    return [name for name in CODECS if name != "lz4" or importlib.util.find_spec("lz4")]


def make_codec(name: str) -> Codec | None:
    """Return the codec of that name, None for "none".

    Raises:
      ValueError: the name is unknown, or the package behind it is not installed.
    """
    if name == "none":
        return None
    if name == "zlib":
        return Codec(name, lambda data: zlib.compress(data, level=1), zlib.decompress)
    if name == "lz4":
        try:
            block: Any = importlib.import_module("lz4.block")
        except ImportError:
            raise ValueError(
                "compression 'lz4' needs the package lz4 (pip install lz4); "
                f"available here: {', '.join(available_codecs())}"
            ) from None
        return Codec(name, block.compress, block.decompress)
    raise ValueError(f"compression {name!r} is not one of {', '.join(CODECS)}")
