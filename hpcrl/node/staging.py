"""Host arrays on their way to a rank's device: through pinned memory, beside the computation.

On a CPU nothing is copied. On a GPU each copy goes through a pinned buffer of its own and over a
stream of its own, so it overlaps with what the device computes; `join` makes the computation wait
for the copies that it is about to read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DEPTH = 2
"""Buffers per name: one may still be read by a copy while the other is filled."""


class Staging:
    """Copies tensors from host memory to `device`.

    Args:
      device: where to.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None
        self._pinned: dict[str, list[tuple[Tensor, Any]]] = {}
        self._fresh: list[Tensor] = []

    def put(self, name: str, host: Tensor) -> Tensor:
        """Return `host` on the device; `join` before it is used.

        Args:
          name: of the buffer; the same name is put again once its tensor was joined.
          host: in host memory; it may be overwritten as soon as this returns.
        """
        if not self._on_gpu:
            return host
        buffer, copied = self._buffer(name, host)
        copied.synchronize()  # the copy before the last of this name
        pinned = buffer[: host.numel()].view(host.shape)
        pinned.copy_(host)
        with torch.cuda.stream(self._stream):
            tensor = pinned.to(self._device, non_blocking=True)
            copied.record(self._stream)
        self._fresh.append(tensor)
        return tensor

    def join(self) -> None:
        """Let the current stream wait for all that was put; on a CPU that is there already."""
        if not self._on_gpu:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in self._fresh:
            tensor.record_stream(current)
        self._fresh.clear()

    def _buffer(self, name: str, host: Tensor) -> tuple[Tensor, Any]:
        """Return the older flat pinned buffer of a name, of at least the host tensor's size."""
        ring = self._pinned.setdefault(name, [])
        if len(ring) == _DEPTH:
            buffer, copied = ring.pop(0)
            if buffer.dtype == host.dtype and buffer.numel() >= host.numel():
                ring.append((buffer, copied))
                return buffer, copied
            copied.synchronize()
        buffer = torch.empty(host.numel(), dtype=host.dtype, pin_memory=True)
        ring.append((buffer, torch.cuda.Event()))
        return ring[-1]
