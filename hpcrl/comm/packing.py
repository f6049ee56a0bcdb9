"""Step messages made smaller for their way, without loss; for networks slower than the codec."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Bytes, Plane, Sender
from hpcrl.compression import Codec, make_codec

_HEAD_BYTES = 8
_LEAST_BYTES = 256
_STEP = 0.8


def packed_nbytes(nbytes: int) -> int:
    """Return the most that a message of `nbytes` can become; what doesn't shrink goes as it is."""
    return _HEAD_BYTES + nbytes


def check_length(nbytes: int, max_message_bytes: int, compression: str) -> None:
    """Raise ValueError where a compressed message might have to be split: its end isn't known."""
    if compression != "none" and packed_nbytes(nbytes) > max_message_bytes:
        raise ValueError(
            f"transport.compression {compression}: a step message of {nbytes} bytes may become one "
            f"of {packed_nbytes(nbytes)}, more than transport.max_message_bytes {max_message_bytes}"
        )


class Outgoing(Protocol):
    """Sends the first bytes of one buffer."""

    def ready(self, nbytes: int) -> Sender:
        """Return what sends the first `nbytes` as they are now. Not while a send is in flight."""


class PlainOutgoing:
    """The bytes themselves; the arguments are those of `make_outgoing`."""

    def __init__(self, plane: Plane, dest: int, tag: int, buffer: Bytes, lengths: Sequence[int]):
        self._senders = {nbytes: plane.sender(dest, tag, buffer[:nbytes]) for nbytes in {*lengths}}

    def ready(self, nbytes: int) -> Sender:
        """Return what sends the first `nbytes`."""
        return self._senders[nbytes]


class PackedOutgoing:
    """The bytes compressed, behind their number; as they are, behind minus their number.

    A persistent send has one length, so there is one for each of a series of lengths, and a message
    goes by the shortest that holds it.
    """

    def __init__(self, plane: Plane, dest: int, tag: int, buffer: Bytes, codec: Codec):
        self._buffer = buffer
        self._codec = codec
        self._room = np.zeros(packed_nbytes(len(buffer)), np.uint8)
        self._count = self._room[:_HEAD_BYTES].view(np.int64)
        lengths = [len(self._room)]
        while lengths[-1] * _STEP >= _LEAST_BYTES:
            lengths.append(int(lengths[-1] * _STEP))
        self._lengths = lengths[::-1]
        self._senders = [plane.sender(dest, tag, self._room[:n]) for n in self._lengths]

    def ready(self, nbytes: int) -> Sender:
        """Compress the first `nbytes`; return what sends them."""
        packed = self._codec.compress(self._buffer[:nbytes].data)
        shrank = len(packed) < nbytes
        data = np.frombuffer(packed, np.uint8) if shrank else self._buffer[:nbytes]
        end = _HEAD_BYTES + len(data)
        self._count[0] = len(data) if shrank else -nbytes
        self._room[_HEAD_BYTES:end] = data
        return self._senders[bisect_left(self._lengths, end)]


def make_outgoing(
    plane: Plane, dest: int, tag: int, buffer: Bytes, lengths: Sequence[int], compression: str
) -> Outgoing:
    """Return what sends one or another number of bytes of `buffer`.

    Args:
      plane: of the messages.
      dest: rank that gets them.
      tag: theirs.
      buffer: whose bytes are sent.
      lengths: the numbers of bytes that occur.
      compression: one of `hpcrl.compression.CODECS`.

    Raises:
      ValueError: the codec is not installed.
    """
    codec = make_codec(compression)
    if codec is None:
        return PlainOutgoing(plane, dest, tag, buffer, lengths)
    return PackedOutgoing(plane, dest, tag, buffer, codec)


class PackedSlots:
    """Where compressed messages arrive, one slot for each source.

    Args:
      slots: how many.
      nbytes: the most that a message has before it is compressed.
      codec: that of the senders.

    Attributes:
      buffer: `<uint8>[slots, *]`, to receive into.
    """

    def __init__(self, slots: int, nbytes: int, codec: Codec):
        self._codec = codec
        self.buffer = np.zeros((slots, packed_nbytes(nbytes)), np.uint8)
        self._counts = self.buffer[:, :_HEAD_BYTES].view(np.int64)

    def unpack(self, slot: int, message: npt.NDArray[np.uint8]) -> None:
        """Decompress what has arrived in `slot` to the beginning of `message`."""
        count = int(self._counts[slot, 0])
        arrived = self.buffer[slot, _HEAD_BYTES : _HEAD_BYTES + abs(count)]
        if count < 0:
            message[:-count] = arrived
            return
        data = self._codec.decompress(arrived.data)
        message[: len(data)] = np.frombuffer(data, np.uint8)
