"""What the ranks of a node tell each other in shared memory, and one of them the file system.

However many ranks a node has, the run directory sees one small file written, and one look for a
request for stacks, per node and tick. The memory has no name in any file system, so nothing is
left of it, whatever ends the ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from hpcrl.run.heartbeat import LEFT, Beat, beats_folder
from hpcrl.run.stacks import newest_request

RECORD_BYTES = 512
_NUM_NAME = 64
_TOKEN_BYTES = 16
_HEAD = struct.Struct("<di128s")
"""When the file was last written (monotonic seconds), by which slot, and the newest request."""
_LOST = _TOKEN_BYTES + _HEAD.size
_TAKE_OVER_TICKS = 2.0
_MOST_SLOTS_APART = 16


class Offer:
    """Memory of this process that others of its node may map, if they can.

    Attributes:
      facts: what tells another process of the node where it is.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("hpcrl-node", os.MFD_CLOEXEC)
        token = secrets.token_hex(_TOKEN_BYTES)
        os.write(self._descriptor, bytes.fromhex(token))
        self.facts = [f"/proc/{os.getpid()}/fd/{self._descriptor}", token]

    def close(self) -> None:
        """Close it; those that have mapped it keep it."""
        os.close(self._descriptor)


class NodeTable:
    """One rank's view of its node's table.

    Args:
      run_dir: the run directory.
      name: of the node's file.
      facts: of the offer of the node's first rank.
      num_slots: ranks of the node.
      slot: of this rank among them.
      num_ranks: of the job.

    Raises:
      OSError: the memory can't be had, or is not the one that was offered: another container
        may have processes of its own with the same numbers.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        facts: list[str],
        num_slots: int,
        slot: int,
        num_ranks: int,
    ):
        path, token = facts
        self._run_dir = run_dir
        self._path = beats_folder(run_dir) / name
        self._slot, self._num_slots, self._num_ranks = slot, num_slots, num_ranks
        self._records = _LOST + num_ranks
        size = self._records + num_slots * RECORD_BYTES
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.pread(descriptor, _TOKEN_BYTES, 0) != bytes.fromhex(token):
                raise OSError(f"{path} is not the memory of this node's first rank")
            os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def request(self) -> str:
        """Name of the newest request for stacks that a rank of this node has seen."""
        return str(_HEAD.unpack_from(self._memory, _TOKEN_BYTES)[2].rstrip(b"\0").decode())

    @property
    def age_s(self) -> float:
        """Seconds since the node's file was last written."""
        return time.monotonic() - float(_HEAD.unpack_from(self._memory, _TOKEN_BYTES)[0])

    @property
    def complete(self) -> bool:
        """Whether every rank of the node has entered a beat."""
        return len(self._lines()) == self._num_slots

    def put(self, beat: Beat, lost: Iterable[int]) -> None:
        """Enter this rank's beat, and whom it knows to be dead."""
        fields = beat._replace(host=beat.host[:_NUM_NAME], name=beat.name[:_NUM_NAME])._asdict()
        start = self._records + self._slot * RECORD_BYTES
        line = json.dumps(fields).encode().ljust(RECORD_BYTES)
        self._memory[start : start + RECORD_BYTES] = line
        for rank in lost:
            self._memory[_LOST + rank] = 1

    def write_if_due(self, beat: Beat) -> None:
        """Write the node's file, where that is this rank's part.

        The first rank does it. The others take over, one after the other, when it does not: it may
        be stopped, dead, or have left.

        Raises:
          OSError: it can't be written.
        """
        writer = _HEAD.unpack_from(self._memory, _TOKEN_BYTES)[1]
        patience = _TAKE_OVER_TICKS + min(self._slot, _MOST_SLOTS_APART) / _MOST_SLOTS_APART
        if self._slot in (0, writer) or self.age_s > patience * beat.tick_s:
            self._write(beat.restart)

    def leave(self, beat: Beat) -> None:
        """Enter that this rank has ended; the last one of the node writes the file.

        Raises:
          OSError: it can't be written.
        """
        self.put(beat._replace(stage=LEFT), ())
        if all(f'"stage": "{LEFT}"'.encode() in record for record in self._lines()):
            self._write(beat.restart)

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()

    def _write(self, restart: int) -> None:
        lost = [r for r in range(self._num_ranks) if self._memory[_LOST + r]]
        word = json.dumps({"restart": restart, "lost": lost}).encode()
        partial = self._path.with_name(f".{self._path.name}.{self._slot}")
        # Not synced: it is news, and a new file's name is what NFS shows to other nodes.
        partial.write_bytes(b"\n".join([*self._lines(), word]) + b"\n")
        os.replace(partial, self._path)
        request = newest_request(self._run_dir).encode()[:128]
        _HEAD.pack_into(self._memory, _TOKEN_BYTES, time.monotonic(), self._slot, request)

    def _lines(self) -> list[bytes]:
        """The records that have been entered."""
        starts = range(self._records, len(self._memory), RECORD_BYTES)
        lines = [self._memory[start : start + RECORD_BYTES].strip(b"\0 ") for start in starts]
        return [line for line in lines if line]
