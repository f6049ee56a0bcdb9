"""Sums over all learners, by Horovod, torch.distributed or MPI. The only importer of horovod.

A learner packs gradients, the number of terms in its loss and its metrics into one flat
float32 tensor, so that a step needs one collective and the mean is over the global batch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from hpcrl.checks import check_dtype, check_shape
from hpcrl.comm.link import Group, wait_until

Backend = Literal["auto", "horovod", "torch", "mpi"]

_PART_ELEMENTS = 2**28
"""1 GiB of float32 per MPI call: counts and bytes stay below what a C int holds."""


class DataParallelError(ValueError):
    """The chosen backend can't be used here; the message says what to do."""


class DriftError(RuntimeError):
    """Learners that must hold equal parameters do not."""


class DataParallel(Protocol):
    """Collectives over the learners on a contiguous `<float32>[n]` tensor, in place."""

    name: str
    """The backend that is really in use: single, horovod, torch or mpi."""
    size: int
    rank: int

    def sum_(self, flat: torch.Tensor) -> None:
        """Replace `flat` by its sum over the learners.

        Raises:
          DeadlineError: a learner did not call in time.
        """

    def broadcast_(self, flat: torch.Tensor, root: int = 0) -> None:
        """Replace `flat` by learner `root`'s."""

    def close(self) -> None:
        """Release the backend. Call before MPI is finalised."""


def make_data_parallel(
    backend: Backend,
    group: Group,
    device: torch.device,
    hosts: Sequence[str],
    *,
    shared_dir: Path | None = None,
    deadline_s: float = 600.0,
) -> DataParallel:
    """Start a backend; every learner calls with the same arguments but `device`.

    `auto` is "single" for one learner, whose Horovod thread would only cost time, else
    Horovod where every learner can use it, else MPI. A named backend is started even for
    one learner.

    Args:
      backend: which one.
      group: the learners.
      device: where the tensors are.
      hosts: each learner's host name.
      shared_dir: a directory that all hosts see; needed by torch on several hosts.
      deadline_s: longest wait for the other learners when torch starts.

    Raises:
      DataParallelError: a named backend can't be used here.
    """
    if backend == "auto":
        if group.size == 1:
            return SingleLearner()
        backend = "mpi" if _learners_without_horovod(group) else "horovod"
    if backend == "horovod":
        without = _learners_without_horovod(group)
        if without:
            raise DataParallelError(
                f"learner.backend horovod: {horovod_obstacle(group) or 'it does not work'} "
                f"(learners {without}); use learner.backend auto, torch or mpi"
            )
        return HorovodDataParallel(group, device)
    if backend == "torch":
        return TorchDataParallel(group, device, hosts, shared_dir, deadline_s)
    return MpiDataParallel(group, device)


class SingleLearner:
    """One learner: nothing to sum."""

    name = "single"
    size = 1
    rank = 0

    def sum_(self, flat: torch.Tensor) -> None:
        """Leave `flat` as it is."""
        _check_flat(flat)

    def broadcast_(self, flat: torch.Tensor, root: int = 0) -> None:
        """Leave `flat` as it is."""
        _check_flat(flat)

    def close(self) -> None:
        """Nothing to release."""


class HorovodDataParallel:
    """Horovod on the learners' own communicator; other ranks never call it."""

    name = "horovod"

    def __init__(self, group: Group, device: torch.device):
        import horovod.torch as hvd

        hvd.init(comm=group.communicator)
        self.size, self.rank = hvd.size(), hvd.rank()
        if (self.size, self.rank) != (group.size, group.rank):
            raise RuntimeError(
                f"Horovod is learner {self.rank} of {self.size}, "
                f"the group is {group.rank} of {group.size}"
            )
        self._hvd = hvd
        self._group = group
        self._memory = _ReachableMemory(staged=device.type == "cuda" and not hvd.cuda_built())

    def sum_(self, flat: torch.Tensor) -> None:
        """Replace `flat` by its sum over the learners."""
        # One name per size: Horovod matches and caches its negotiation by name.
        name = f"sum.{flat.numel()}"

        def start(reachable: torch.Tensor) -> int:
            return self._hvd.allreduce_async_(reachable, op=self._hvd.Sum, name=name)

        self._finish(flat, start, name)

    def broadcast_(self, flat: torch.Tensor, root: int = 0) -> None:
        """Replace `flat` by learner `root`'s."""
        name = f"broadcast.{root}.{flat.numel()}"

        def start(reachable: torch.Tensor) -> int:
            return self._hvd.broadcast_async_(reachable, root, name=name)

        self._finish(flat, start, name)

    def _finish(self, flat: torch.Tensor, start: Callable[[torch.Tensor], int], name: str) -> None:
        with self._memory.holding(flat) as reachable:
            handle = start(reachable)
            wait_until(lambda: self._hvd.poll(handle), self._group.waiter(f"Horovod's {name}"))
            self._hvd.synchronize(handle)

    def close(self) -> None:
        """Stop Horovod's thread."""
        self._hvd.shutdown()


class TorchDataParallel:
    """torch.distributed: nccl for CUDA tensors, gloo for the others.

    The learners meet in a file, so torch opens no store server. Both libraries then open
    connections of their own between the learners: gloo on the loopback interface when all
    learners share a host, otherwise on the interface in GLOO_SOCKET_IFNAME or, without
    that variable, on the one that the host's name resolves to.
    """

    name = "torch"

    def __init__(
        self,
        group: Group,
        device: torch.device,
        hosts: Sequence[str],
        shared_dir: Path | None,
        deadline_s: float,
    ):
        if group.communicator is None and group.size > 1:
            raise DataParallelError(
                "learner.backend torch: several learners share one process here, which only "
                "learner.backend mpi supports"
            )
        one_host = len(set(hosts)) == 1
        if not one_host and shared_dir is None:
            raise DataParallelError(
                f"learner.backend torch: learners on {sorted(set(hosts))} need a directory that "
                "all hosts see, and none was given"
            )
        if one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.size, self.rank = group.size, group.rank
        self._group = group
        self._meeting_dir = _make_meeting_dir(group, None if one_host else shared_dir)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(self._meeting_dir / "store"), group.size),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=deadline_s),
            device_id=device if device.type == "cuda" and device.index is not None else None,
        )

    def sum_(self, flat: torch.Tensor) -> None:
        """Replace `flat` by its sum over the learners."""
        _check_flat(flat)
        self._finish(dist.all_reduce(flat, async_op=True), f"sum of {flat.numel()} values")

    def broadcast_(self, flat: torch.Tensor, root: int = 0) -> None:
        """Replace `flat` by learner `root`'s."""
        _check_flat(flat)
        work = dist.broadcast(flat, src=root, async_op=True)
        self._finish(work, f"broadcast of {flat.numel()} values from learner {root}")

    def _finish(self, work: Any, what: str) -> None:
        wait_until(work.is_completed, self._group.waiter(f"torch.distributed's {what}"))
        work.wait()

    def close(self) -> None:
        """End the process group and remove the file that the learners met in."""
        dist.destroy_process_group()
        if self.rank == 0:
            shutil.rmtree(self._meeting_dir, ignore_errors=True)


class MpiDataParallel:
    """The group's own all-reduce, on the CPU tensor's memory or a pinned copy of a CUDA one."""

    name = "mpi"

    def __init__(self, group: Group, device: torch.device, part_elements: int = _PART_ELEMENTS):
        self.size, self.rank = group.size, group.rank
        self._group = group
        self._memory = _ReachableMemory(staged=device.type != "cpu")
        self._part_elements = part_elements

    def sum_(self, flat: torch.Tensor) -> None:
        """Replace `flat` by its sum over the learners."""
        with self._memory.holding(flat) as reachable:
            array = reachable.numpy()
            for start in range(0, len(array), self._part_elements):
                self._group.allreduce(array[start : start + self._part_elements], "sum")

    def broadcast_(self, flat: torch.Tensor, root: int = 0) -> None:
        """Replace `flat` by learner `root`'s."""
        with self._memory.holding(flat) as reachable:
            array = reachable.numpy()
            data = self._group.broadcast(array.tobytes() if self.rank == root else None, root)
            array[:] = np.frombuffer(data, np.float32)

    def close(self) -> None:
        """Nothing to release: the communicator is the link's."""


class _ReachableMemory:
    """Memory that the library can read: the tensor's own, or a pinned host copy if `staged`."""

    def __init__(self, *, staged: bool):
        self._staged = staged
        self._host = torch.empty(0)

    @contextmanager
    def holding(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give a tensor that holds `flat`; what it holds afterwards is copied back."""
        _check_flat(flat)
        flat = flat.detach()
        if not self._staged:
            yield flat
            return
        if self._host.numel() != flat.numel():
            self._host = torch.empty(flat.numel(), pin_memory=torch.cuda.is_available())
        self._host.copy_(flat)
        yield self._host
        flat.copy_(self._host)


def parameters_checksum(flat_params: torch.Tensor) -> np.uint64:
    """Return a 64-bit digest of the exact bytes of a contiguous tensor."""
    data = flat_params.detach().cpu().numpy().data
    return np.uint64(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))


def check_in_sync(group: Group, flat_params: torch.Tensor, step: int) -> None:
    """Compare all learners' parameters to the last bit; every learner calls and learns of it.

    Raises:
      DriftError: they differ; names the learners that are not with the majority (with the
        lowest learner, where there is none).
    """
    checksum = parameters_checksum(flat_params)
    checksums = group.allgather(np.array([checksum], np.uint64))[:, 0].tolist()
    usual = Counter(checksums).most_common(1)[0][0]
    drifted = [learner for learner, value in enumerate(checksums) if value != usual]
    if drifted:
        raise DriftError(
            f"after learner step {step} the parameters of learners {drifted} differ from learner "
            f"{checksums.index(usual)}'s: checksums {[f'{value:016x}' for value in checksums]}"
        )


def _check_flat(flat: torch.Tensor) -> None:
    check_shape("flat", flat, None)
    check_dtype("flat", flat, torch.float32)
    if not flat.is_contiguous():
        raise ValueError("flat: expected a contiguous tensor")


def horovod_obstacle(group: Group) -> str | None:
    """Why this learner can't use Horovod, None if it can."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        return f"it can't be imported here ({error}); `make horovod` builds it"
    if not hvd.mpi_built():
        return "it was built without MPI; `make horovod` builds it with"
    if group.communicator is None:
        return "it needs learners that are MPI ranks, not threads of one process"
    if not group.thread_multiple:
        return "this MPI does not give thread level MULTIPLE, which its thread needs"
    return None


def _learners_without_horovod(group: Group) -> list[int]:
    """Collective: the learners that can't use Horovod, the same list on all."""
    obstacle = np.array([horovod_obstacle(group) is not None])
    return np.flatnonzero(group.allgather(obstacle)[:, 0]).tolist()


def _make_meeting_dir(group: Group, parent: Path | None) -> Path:
    """Collective: a new private directory, made by the first learner."""
    made = None
    if group.rank == 0:
        made = os.fsencode(tempfile.mkdtemp(prefix=".learners-", dir=parent))
    return Path(os.fsdecode(group.broadcast(made, 0)))
