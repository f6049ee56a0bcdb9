"""The link over MPI. The only importer of mpi4py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, cast

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcrl.comm.link import PLANES, Bytes, Incoming, PeerLostError, split_bytes, wait_until
from hpcrl.node.slurm_env import survives_deaths
from hpcrl.run.rank_log import log
from hpcrl.timing import Pulse, Waiter, WaitPolicy

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Deaths:
    """Ranks that died, under `mpirun --with-ft ulfm`; without it MPI ends the whole job.

    Args:
      expendable: ranks that may die.
      lost_ranks: grows by those of them that have died.
    """

    def __init__(self, label: Callable[[], str]):
        self.expendable: frozenset[int] = frozenset()
        self.lost_ranks: set[int] = set()
        self._label = label

    def note(self, rank: int, error: MPI.Exception) -> None:
        """A receive from `rank`, or a send to it, has failed.

        Raises:
          PeerLostError: the run can't do without it.
          MPI.Exception: it did not fail because a rank has died.
        """
        if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            raise error
        if rank in self.lost_ranks:
            return
        if rank not in self.expendable:
            raise PeerLostError(f"rank {rank} has died, and the run can't go on without it")
        self.lost_ranks.add(rank)
        log.warning("%s: rank %d has died; the run goes on without it", self._label(), rank)


class MpiReceivers:
    """Persistent receives, tested together; a message over the part size is several receives."""

    def __init__(
        self,
        comm: MPI.Comm,
        incoming: Sequence[Incoming],
        part_bytes: int,
        deaths: Deaths | None,
    ):
        self._deaths = deaths
        self._sources = [one.source for one in incoming]
        self._requests: list[MPI.Prequest] = []
        self._message_of: list[int] = []
        self._requests_of: list[list[int]] = []
        for index, (source, tag, buffer) in enumerate(incoming):
            parts = split_bytes(buffer, part_bytes)
            first = len(self._requests)
            self._requests += [comm.Recv_init([p, MPI.BYTE], source, tag) for p in parts]
            self._requests_of.append(list(range(first, len(self._requests))))
            self._message_of += [index] * len(parts)
        self._missing = [0] * len(self._requests_of)

    def start(self, index: int) -> None:
        """Post receive `index`; one from a dead rank never completes."""
        if self._deaths and self._sources[index] in self._deaths.lost_ranks:
            return
        self._missing[index] = len(self._requests_of[index])
        for request in self._requests_of[index]:
            self._requests[request].Start()

    def poll(self) -> Sequence[int]:
        """Return the indices that completed since the last call."""
        if self._deaths:
            return self._poll_each(self._deaths)
        finished = MPI.Prequest.Testsome(self._requests)
        if not finished:
            return ()
        complete = []
        for request in finished:
            message = self._message_of[request]
            self._missing[message] -= 1
            if self._missing[message] == 0:
                complete.append(message)
        return complete

    def _poll_each(self, deaths: Deaths) -> Sequence[int]:
        """The same one by one: from a failed Testsome one can't tell who completed."""
        complete = []
        for message, source in enumerate(self._sources):
            if not self._missing[message] or source in deaths.lost_ranks:
                continue
            try:
                # An inactive request is complete, so parts that came earlier count again.
                parts = [self._requests[request].Test() for request in self._requests_of[message]]
            except MPI.Exception as error:
                deaths.note(source, error)
                continue
            if all(parts):
                self._missing[message] = 0
                complete.append(message)
        return complete

    def cancel(self) -> None:
        """Withdraw posted receives and free the requests."""
        lost = self._deaths.lost_ranks if self._deaths else ()
        for message, missing in enumerate(self._missing):
            if missing and self._sources[message] not in lost:
                for request in self._requests_of[message]:
                    if not self._requests[request].Test():
                        self._requests[request].Cancel()
                        self._requests[request].Wait()
        for handle in self._requests:
            handle.Free()
        self._requests = []
        self._missing = []


class MpiSender:
    """One persistent send, in parts where it is over the part size."""

    def __init__(
        self,
        comm: MPI.Comm,
        dest: int,
        tag: int,
        buffer: Bytes,
        synchronous: bool,
        part_bytes: int,
        deaths: Deaths | None,
    ):
        self._dest = dest
        self._deaths = deaths
        init: Callable[..., Any] = comm.Ssend_init if synchronous else comm.Send_init
        self._requests: list[MPI.Prequest] = [
            init([part, MPI.BYTE], dest, tag) for part in split_bytes(buffer, part_bytes)
        ]
        self._single = self._requests[0] if len(self._requests) == 1 else None

    def start(self) -> None:
        """Start the send."""
        for request in self._requests:
            request.Start()

    def done(self) -> bool:
        """Whether the buffer may be reused."""
        try:
            if self._single is not None:
                return self._single.Test()
            return MPI.Prequest.Testall(self._requests)
        except MPI.Exception as error:
            if self._deaths is None:
                raise
            self._deaths.note(self._dest, error)
            return True


class MpiPlane:
    """Point-to-point endpoints on one duplicated communicator."""

    def __init__(self, comm: MPI.Comm, part_bytes: int, deaths: Deaths | None):
        self._comm = comm
        self._part_bytes = part_bytes
        self._deaths = deaths

    def receivers(self, incoming: Sequence[Incoming]) -> MpiReceivers:
        """Create persistent receives."""
        return MpiReceivers(self._comm, incoming, self._part_bytes, self._deaths)

    def sender(self, dest: int, tag: int, buffer: Bytes, *, synchronous: bool = False) -> MpiSender:
        """Create a persistent send."""
        return MpiSender(self._comm, dest, tag, buffer, synchronous, self._part_bytes, self._deaths)


class MpiGathering:
    """A non-blocking all-gather."""

    def __init__(self, comm: MPI.Intracomm, array: npt.NDArray[Any]):
        self._sent = array.copy()
        self.result = np.empty((comm.Get_size(), *array.shape), array.dtype)
        self._request = comm.Iallgather(self._sent, self.result)

    def done(self) -> bool:
        """Whether every member's array is here."""
        return self._request.Test()


class MpiGroup:
    """Non-blocking collectives, polled so that a missing member is named by a deadline."""

    def __init__(self, comm: MPI.Intracomm, waiter: Callable[[str], Waiter], part_bytes: int):
        self.communicator = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.thread_multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.waiter = waiter
        self._part_bytes = part_bytes

    def _wait(self, request: MPI.Request, what: str) -> None:
        wait_until(request.Test, self.waiter(what))

    def allreduce(self, array: npt.NDArray[Any], op: Literal["sum", "max", "min"]) -> None:
        """Reduce `array` over the group, in place."""
        if self.size > 1:
            request = self.communicator.Iallreduce(MPI.IN_PLACE, array, _OPS[op])
            self._wait(request, f"an all-reduce ({op}) of {array.size} values")

    def allgather(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return every member's `array`, stacked."""
        gathering = self.start_allgather(array)
        wait_until(gathering.done, self.waiter(f"an all-gather of {array.size} values"))
        return gathering.result

    def start_allgather(self, array: npt.NDArray[Any]) -> MpiGathering:
        """Begin an all-gather of `array`."""
        return MpiGathering(self.communicator, array)

    def broadcast(self, data: bytes | None, root: int) -> bytes:
        """Return `data` of `root` on every member, in parts under the size limit."""
        size = np.array([len(data) if data is not None else 0], np.int64)
        self._wait(self.communicator.Ibcast(size, root), f"a broadcast from member {root}")
        buffer = np.empty(int(size[0]), np.uint8)
        if data is not None and self.rank == root:
            buffer[:] = np.frombuffer(data, np.uint8)
        for part in split_bytes(buffer, self._part_bytes):
            request = self.communicator.Ibcast([part, MPI.BYTE], root)
            self._wait(request, f"a broadcast of {len(buffer)} bytes from member {root}")
        return buffer.tobytes()

    def barrier(self) -> None:
        """Return once every member has called."""
        self._wait(self.communicator.Ibarrier(), "a barrier")


class MpiLink:
    """This process's rank of MPI.COMM_WORLD.

    Args:
      deadline_s: longest wait.
      max_message_bytes: longer messages are split.
      fault_tolerant: the launcher lets a rank die without ending the job.
    """

    def __init__(self, *, deadline_s: float, max_message_bytes: int, fault_tolerant: bool = False):
        world = MPI.COMM_WORLD
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        self.label = f"rank {self.rank}"
        self.pulse = Pulse()
        self.fault_tolerant = fault_tolerant
        self._deaths = Deaths(lambda: f"{self.label} (rank {self.rank})")
        self.lost_ranks = self._deaths.lost_ranks
        self.wait_policy: WaitPolicy = "backoff"
        self.deadline_s = deadline_s
        self.max_message_bytes = max_message_bytes
        # The order of Dup calls is the same on all ranks: it is collective.
        self._planes = {name: world.Dup() for name in PLANES}
        self._collectives = world.Dup()
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        self.node_size = node.Get_size()
        self.node_rank = node.Get_rank()
        node.Free()

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks that may die; none unless the launcher allows it."""
        return self._deaths.expendable

    @expendable.setter
    def expendable(self, ranks: frozenset[int]) -> None:
        self._deaths.expendable = ranks if self.fault_tolerant else frozenset()

    def plane(self, name: str) -> MpiPlane:
        """Return one of the planes."""
        deaths = self._deaths if self.fault_tolerant else None
        return MpiPlane(self._planes[name], self.max_message_bytes, deaths)

    def group(self, ranks: Sequence[int]) -> MpiGroup | None:
        """Collective: the group of `ranks`, None on a rank that isn't in it."""
        if list(ranks) == list(range(self.size)):
            return MpiGroup(self._collectives.Dup(), self._named_waiter, self.max_message_bytes)
        return self.team([ranks])

    def team(self, teams: Sequence[Sequence[int]]) -> MpiGroup | None:
        """Collective: the group of this rank's one of `teams`, None on a rank that is in none."""
        mine = [index for index, ranks in enumerate(teams) if self.rank in ranks]
        color = mine[0] if mine else MPI.UNDEFINED
        order = list(teams[color]).index(self.rank) if mine else 0
        comm = cast(MPI.Intracomm, self._collectives.Split(color, order))
        if comm == MPI.COMM_NULL:
            return None
        return MpiGroup(comm, self._named_waiter, self.max_message_bytes)

    def _named_waiter(self, what: str) -> Waiter:
        return self.waiter(lambda: f"{self.label} (rank {self.rank}) waited in {what}")

    def waiter(self, describe: Callable[[], str], deadline_s: float | None = None) -> Waiter:
        """Return a waiter with this link's policy."""
        return Waiter(self.wait_policy, deadline_s or self.deadline_s, describe, self.pulse)


def alone() -> MPI.Intracomm:
    """The communicator of this process and no other; the first call starts MPI."""
    return MPI.COMM_SELF


def processor_name() -> str:
    """The host's name as MPI knows it."""
    return MPI.Get_processor_name()


def library_facts() -> dict[str, Any]:
    """What `hpcrl check` reports of the MPI library."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": MPI.Get_library_version().split("\x00")[0].splitlines()[0].strip(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": levels[MPI.Query_thread()],
        "world_size": MPI.COMM_WORLD.Get_size(),
    }


def world_rank() -> int:
    """Rank in MPI.COMM_WORLD; the first call starts MPI."""
    return MPI.COMM_WORLD.Get_rank()


def finalize() -> None:
    """End MPI on this rank; every rank must. A later non-zero exit code is then no abort."""
    MPI.Finalize()


def abort(code: int) -> NoReturn:
    """End every rank of the job at once with exit code `code`, or another that is not 0.

    Where the launcher lets ranks die, an abort ends this rank alone and the others are not told. So
    mpirun is asked to end, and this rank dies by a signal, which those that need it do notice.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if survives_deaths():
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.Abort(code)
    raise SystemExit(code)
