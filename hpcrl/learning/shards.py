"""One server's shard of the parameters with its optimizer, and the whole made of all shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcrl.comm.shard_states import ShardState
from hpcrl.config.sections import OptimizerConfig
from hpcrl.learning.optim import FlatParameters, Optimizer
from hpcrl.learning.trainer import load_model
from hpcrl.topology.shards import Bounds

Arrays = Mapping[str, npt.NDArray[np.generic]]
MODEL = "model"
"""Name of the parameters themselves among the arrays of a shard; the others are moments."""


class Slice:
    """A stretch of the flat parameters, as an optimizer sees it (`optim.Parameters`)."""

    def __init__(self, value: Tensor):
        self.value = value
        self.grad = torch.zeros_like(value)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return all of it under one name."""
        return {MODEL: flat}


class Taken(NamedTuple):
    """Whether a gradient was applied, and how many versions it was behind."""

    applied: bool
    lag: int


class Shard:
    """Parameters that take gradients in the order in which they come.

    The gradient was clipped where it was whole, so nothing is clipped here.

    Args:
      value: `<float32>[n]`, the parameters at the start; copied.
      config: the optimizer.
      total_agent_steps: where a linear schedule reaches 0.
      max_lag: most versions that a gradient may be behind.

    Attributes:
      version: gradients taken since the run began.
    """

    def __init__(
        self, value: Tensor, config: OptimizerConfig, total_agent_steps: int, max_lag: int
    ):
        self._slice = Slice(value.clone())
        self._optimizer = Optimizer(
            self._slice, replace(config, max_grad_norm=0.0), total_agent_steps
        )
        self._max_lag = max_lag
        self.version = 0

    @property
    def parameters(self) -> npt.NDArray[np.float32]:
        """The parameters now, `<float32>[n]`, a view."""
        array: npt.NDArray[np.float32] = self._slice.value.numpy()
        return array

    def take(self, gradient: npt.NDArray[np.float32], version: int, agent_steps: int) -> Taken:
        """Apply a gradient, unless it is too old.

        Args:
          gradient: `<float32>[n]`.
          version: of this shard that it was computed from.
          agent_steps: trained on before it; sets the learning rate.
        """
        lag = self.version - version
        if lag > self._max_lag:
            return Taken(False, lag)
        self._slice.grad.copy_(torch.from_numpy(gradient))
        self._optimizer.step(agent_steps)
        self.version += 1
        return Taken(True, lag)

    def learning_rate(self, agent_steps: int) -> float:
        """Return the step size once `agent_steps` have been trained on."""
        return self._optimizer.learning_rate(agent_steps)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's moments."""
        return _moments(self._optimizer)

    def state(self) -> ShardState:
        """Return copies of all that a checkpoint holds of it."""
        state = self._optimizer.state_dict()
        step_count = int(state.pop("step_count"))
        arrays = {_kind(name): tensor.numpy() for name, tensor in state.items()}
        return ShardState(self.version, step_count, {MODEL: self.parameters.copy(), **arrays})

    def load_state(self, state: ShardState) -> None:
        """Continue from a state.

        Raises:
          ValueError: it is another optimizer's.
        """
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in state.arrays.items()}
        self._slice.value.copy_(arrays.pop(MODEL))
        saved = {f"{kind}.{MODEL}": tensor for kind, tensor in arrays.items()}
        self._optimizer.load_state_dict({"step_count": torch.tensor(state.step_count), **saved})
        self.version = state.version


def _kind(name: str) -> str:
    return name.removesuffix(f".{MODEL}")


def _moments(optimizer: Optimizer) -> tuple[str, ...]:
    return tuple(_kind(name) for name in optimizer.state_dict() if name != "step_count")


def join(
    whole: FlatParameters, states: Sequence[ShardState], bounds: Sequence[Bounds]
) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, Any]]:
    """Return a checkpoint's tensors and state from all shards, in their order.

    The tensors are named as those of `trainer.Trainer.state`, so they tell nothing of shards.

    Args:
      whole: any network's flat parameters, for their layout.
      states: of the shards.
      bounds: of the shards.
    """
    first = states[0]
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for kind in first.arrays:
        flat = torch.from_numpy(np.concatenate([state.arrays[kind] for state in states]))
        prefix = kind if kind == MODEL else f"optimizer.{kind}"
        for name, view in whole.named(flat).items():
            tensors[f"{prefix}.{name}"] = view.numpy().copy()
    tensors["optimizer.step_count"] = np.array(first.step_count)
    records = [
        {"first": a, "last": b, "version": state.version, "step_count": state.step_count}
        for (a, b), state in zip(bounds, states, strict=True)
    ]
    return tensors, {"shards": records}


@torch.no_grad()
def cut(
    whole: FlatParameters,
    tensors: Arrays,
    state: Mapping[str, Any],
    bounds: Bounds,
    version: int,
) -> ShardState:
    """Return one shard, however many there were when the checkpoint was written.

    Args:
      whole: of the network that the run trains; its parameters become the checkpoint's.
      tensors: that `join` gave.
      state: that `join` gave.
      bounds: of the shard.
      version: that all shards begin with: only differences of one shard's versions matter.

    Raises:
      ValueError: they are another network's.
    """
    sections: dict[str, dict[str, Tensor]] = {}
    for name, array in tensors.items():
        section, _, rest = name.partition(".")
        if section != MODEL:
            section, _, rest = rest.partition(".")
        sections.setdefault(section, {})[rest] = torch.from_numpy(np.array(array))
    del sections["step_count"]
    load_model(whole, sections[MODEL])
    arrays = {}
    for kind, named in sections.items():
        flat = torch.zeros_like(whole.value)
        for name, view in whole.named(flat).items():
            view.copy_(named[name])
        arrays[kind] = flat[bounds[0] : bounds[1]].numpy()
    return ShardState(version, step_count_of(state["shards"], bounds), arrays)


def step_count_of(records: Sequence[Mapping[str, int]], bounds: Bounds) -> int:
    """Return the optimizer steps of a shard that is cut from shards with other bounds.

    Adam corrects its moments by one count for all of a shard; of parts with different counts it
    is their mean, rounded. They differ by the gradients that were under way.
    """
    first, last = bounds
    shares = [max(0, min(r["last"], last) - max(r["first"], first)) for r in records]
    counts = [record["step_count"] for record in records]
    return round(float(np.average(counts, weights=shares)))
