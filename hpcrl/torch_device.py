"""The torch device of a rank, and its thread count."""

from __future__ import annotations

import os

import torch

from hpcrl.devices import choose_device, detect_gpu_count, torch_backend, visible_gpus
from hpcrl.topology import Topology


def rank_device(topology: Topology, rank: int) -> torch.device:
    """Return the device that the topology gives `rank`, and set torch's threads.

    Raises:
      DeviceError: the GPU isn't there.
    """
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
