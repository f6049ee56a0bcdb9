"""The torch device of a rank, and its thread count."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from hpcrl.node.devices import choose_device, detect_gpu_count, torch_backend, visible_gpus
from hpcrl.topology import Topology

_M_MMAP_MAX, _M_TRIM_THRESHOLD, _M_TOP_PAD = -4, -1, -2
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Make malloc keep large freed blocks for the next step instead of returning them.

    Activations of tens of megabytes are otherwise mapped, zeroed by the kernel page by page
    and unmapped in every learner step.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            libc.mallopt(_M_TOP_PAD, 2**28)


def rank_device(topology: Topology, rank: int) -> torch.device:
    """Return the device that the topology gives `rank`, and set torch's threads.

    Raises:
      DeviceError: the GPU isn't there.
    """
    keep_freed_memory()
    torch.set_num_threads(int(os.environ.get("HPCRL_THREADS", "1")))
    index = topology.device_of[rank]
    if index is None:
        return torch.device("cpu")
    backend = torch_backend()
    visible = visible_gpus(os.environ, detect_gpu_count(backend), backend)
    gpu = choose_device(index, visible, topology.host_of(rank))
    if gpu.pin is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.pin
    return torch.device("cuda", gpu.ordinal)
