"""The forward pass of acting: rows in host memory → actions, on a CPU or a GPU.

On a GPU small batches cost launches of kernels rather than computation. So there a batch is
padded to one of few sizes, and each size is captured as a CUDA graph, replayed with one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpcrl.agents import ActOutput
from hpcrl.brain import Brain, autocast
from hpcrl.node.staging import Staging
from hpcrl.types import NetInputs

_SMALLEST_BUCKET = 8
_WARM_UP_CALLS = 3

Capture = Callable[[Callable[[], ActOutput], torch.Generator], Callable[[], ActOutput]]


class Forward:
    """Chooses actions for batches of rows.

    Args:
      brain: acting rule.
      network: on `device`.
      device: where it lives.
      precision: autocast.
      generator: of the action sampling, on `device`.
      greedy: take the likeliest action instead of a sample.
    """

    def __init__(
        self,
        brain: Brain,
        network: nn.Module,
        device: torch.device,
        precision: str,
        generator: torch.Generator,
        greedy: bool,
    ):
        self._brain = brain
        self._network = network
        self._device = device
        self._precision = precision
        self._generator = generator
        self._greedy = greedy
        self._staging = Staging(device)

    def act(
        self,
        observation: Mapping[str, npt.NDArray[np.generic]],
        rows: Mapping[str, npt.NDArray[np.generic]],
        core_state: Tensor,
        epsilon: Tensor | None,
    ) -> ActOutput:
        """Choose an action for each of n rows.

        Args:
          observation: leaves by path, `[n, ...]`, stacks where the network sees stacks.
          rows: `reward`, `previous_action` and `start`, `[n, ...]`.
          core_state: `<float32>[n, S]` on the device.
          epsilon: `<float32>[n]` on the device, for agents that explore so.
        """
        put = self._put
        inputs = NetInputs(
            {path: put(f"obs:{path}", leaf) for path, leaf in observation.items()},
            put("reward", rows["reward"]),
            put("previous_action", rows["previous_action"]),
            put("start", rows["start"]),
        )
        self._staging.join()
        return self._choose(inputs, core_state, epsilon)

    def _put(self, name: str, array: npt.NDArray[np.generic]) -> Tensor:
        """One-step time axis in front: `[1, n, ...]`."""
        host = torch.from_numpy(np.ascontiguousarray(array)[None])
        return self._staging.put(name, host)

    def _choose(self, inputs: NetInputs, core_state: Tensor, epsilon: Tensor | None) -> ActOutput:
        with autocast(self._precision, self._device):
            return self._brain.act(
                self._network, inputs, core_state, self._generator, self._greedy, epsilon
            )


class BucketedForward(Forward):
    """A forward pass at few batch sizes, powers of two, each captured at its first use.

    The rows that pad a batch are whatever the last batch left there: rows don't mix.

    Args:
      *arguments: of `Forward`.
      capture: turns a function that always reads and writes the same tensors into one that does
        the same faster.
    """

    def __init__(self, *arguments: Any, capture: Capture):
        super().__init__(*arguments)
        self._capture = capture
        self._buckets: dict[int, _Bucket] = {}

    def _choose(self, inputs: NetInputs, core_state: Tensor, epsilon: Tensor | None) -> ActOutput:
        rows = len(core_state)
        size = max(_SMALLEST_BUCKET, 1 << (rows - 1).bit_length())
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket(inputs, core_state, epsilon, size)
            static = bucket.tensors
            choose = super()._choose
            bucket.run = self._capture(lambda: choose(*static), self._generator)
        bucket.fill(inputs, core_state, epsilon)
        out = bucket.run()
        # Copies: the next batch of this size overwrites what the graph gives.
        return ActOutput(
            out.action[:rows].clone(),
            {name: value[:rows].clone() for name, value in out.behaviour.items()},
            out.core_state[:rows].clone(),
        )


class _Bucket:
    """Tensors of one batch size that stay where they are."""

    run: Callable[[], ActOutput]

    def __init__(
        self, inputs: NetInputs, core_state: Tensor, epsilon: Tensor | None, size: int
    ) -> None:
        def room(tensor: Tensor) -> Tensor:
            shape = (1, size, *tensor.shape[2:])
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)

        static = NetInputs(
            {path: room(leaf) for path, leaf in inputs.observation.items()},
            room(inputs.reward),
            room(inputs.previous_action),
            room(inputs.start),
        )
        state = core_state.new_zeros(size, core_state.shape[1])
        self.tensors = (static, state, None if epsilon is None else epsilon.new_zeros(size))

    def fill(self, inputs: NetInputs, core_state: Tensor, epsilon: Tensor | None) -> None:
        """Copy a batch over the first rows."""
        static, state, exploration = self.tensors
        rows = len(core_state)
        for path, leaf in inputs.observation.items():
            static.observation[path][:, :rows].copy_(leaf)
        static.reward[:, :rows].copy_(inputs.reward)
        static.previous_action[:, :rows].copy_(inputs.previous_action)
        static.start[:, :rows].copy_(inputs.start)
        state[:rows].copy_(core_state)
        if exploration is not None and epsilon is not None:
            exploration[:rows].copy_(epsilon)


def capture_cuda(
    compute: Callable[[], ActOutput], generator: torch.Generator
) -> Callable[[], ActOutput]:
    """Capture a CUDA graph of `compute`; weights that are overwritten in place are read anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):  # libraries allocate and choose algorithms at first
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = compute()

    def replay() -> ActOutput:
        graph.replay()
        return out

    return replay


def make_forward(
    brain: Brain,
    network: nn.Module,
    device: torch.device,
    precision: str,
    generator: torch.Generator,
    greedy: bool,
    graphs: bool = True,
) -> Forward:
    """Return the forward pass that suits the device; `graphs` allows CUDA graphs on a GPU."""
    arguments = (brain, network, device, precision, generator, greedy)
    if device.type == "cuda" and graphs:
        return BucketedForward(*arguments, capture=capture_cuda)
    return Forward(*arguments)
