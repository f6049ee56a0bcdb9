"""One learner's replica: forward, backward, reduction over the learners, optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hpcrl.brain import Brain
from hpcrl.config.sections import LearnerConfig
from hpcrl.learning.backward import Backward, NonFiniteLossError, explain_non_finite
from hpcrl.learning.data_parallel import DataParallel
from hpcrl.learning.loss_scaling import LossScaler
from hpcrl.learning.optim import FlatParameters, Optimizer
from hpcrl.timing import StageTimer
from hpcrl.types import UnrollBatch


class StepResult(NamedTuple):
    """One learner step over the global batch.

    Attributes:
      num_steps: real transitions, each one agent step that was trained on; with a replay,
        sampled items.
      values: the agent's figures, learning rate, gradient norm and policy lag.
      skipped: float16 only: the step was skipped, as the scaled gradient overflowed.
      priorities: `<float32>[B]`, of this learner's replay items; None without a replay.
    """

    num_steps: int
    values: dict[str, float]
    skipped: bool
    priorities: npt.NDArray[np.float32] | None = None


class Trainer:
    """Network, optimizer and the global-batch gradient step.

    The gradient is that of the MEAN loss over all real transitions (or replay items) of the
    global batch: every learner sums over its own, gradients and counts travel in one
    all-reduce, and the division and the clip come after it. So N learners with B/N unrolls
    equal one with B.
    """

    _bootstrap_rows = 1
    """Last rows of what `step` is given that only bootstrap."""

    def __init__(
        self,
        brain: Brain,
        config: LearnerConfig,
        data_parallel: DataParallel,
        device: torch.device,
        total_agent_steps: int,
        seed: int,
    ):
        self._brain = brain
        self._config = config
        self._data_parallel = data_parallel
        self._device = device
        self._network = brain.make_network(seed).to(device).train()
        self.flat = FlatParameters(self._network)
        if config.compile:
            self._network.compile()
        data_parallel.broadcast_(self.flat.value)
        self._target: nn.Module | None = None
        if brain.target_update_steps:
            self._target = brain.make_network(seed).to(device).train().requires_grad_(False)
            self._target_flat = FlatParameters(self._target)
            self._target_flat.value.copy_(self.flat.value)
        self.optimizer = Optimizer(self.flat, config.optimizer, total_agent_steps)
        self.scaler = LossScaler() if config.precision == "float16" else None
        self._seed = seed
        self._backward = Backward(
            brain, config, self._network, self.flat, device, seed, self._bootstrap_rows
        )

    def parameters(self) -> npt.NDArray[np.float32]:
        """Return the flat parameters in host memory, `<float32>[P]`; a view on the CPU."""
        array: npt.NDArray[np.float32] = self.flat.value.cpu().numpy()
        return array

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return copies of parameters, optimizer and loss scale, by name."""
        tensors = {f"model.{n}": v for n, v in self.flat.named(self.flat.value).items()}
        tensors |= {f"optimizer.{n}": v for n, v in self.optimizer.state_dict().items()}
        if self._target is not None:
            named = self._target_flat.named(self._target_flat.value)
            tensors |= {f"target.{n}": v for n, v in named.items()}
        if self.scaler:
            tensors |= {f"scaler.{n}": v for n, v in self.scaler.state_dict().items()}
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Continue from what `state` gave.

        Raises:
          ValueError: names or shapes differ: another network, optimizer or precision.
        """
        sections: dict[str, dict[str, torch.Tensor]] = {
            name: {} for name in ("model", "optimizer", "scaler", "target")
        }
        for name, array in arrays.items():
            section, _, rest = name.partition(".")
            sections[section][rest] = torch.from_numpy(np.array(array))
        for section, has in (("scaler", self.scaler), ("target", self._target)):
            if bool(sections[section]) != (has is not None):
                raise ValueError(_other_kind(section, bool(sections[section])))
        load_model(self.flat, sections["model"])
        self.optimizer.load_state_dict(sections["optimizer"])
        if self._target is not None:
            load_model(self._target_flat, sections["target"])
        if self.scaler:
            self.scaler.load_state_dict(sections["scaler"])

    def step(
        self, batch: UnrollBatch, version: int, agent_steps: int, timer: StageTimer
    ) -> StepResult:
        """Take one optimizer step.

        Args:
          batch: this learner's share of the global batch, in host memory.
          version: of the weights that this step starts from.
          agent_steps: trained on so far, for the schedule.
          timer: gets the stages copy, forward_backward, all_reduce and optimizer.

        Raises:
          NonFiniteLossError: on every learner alike.
        """
        self._update_target(version)
        return self._update(batch, version, agent_steps, timer)

    def _update(
        self, batch: UnrollBatch, version: int, agent_steps: int, timer: StageTimer
    ) -> StepResult:
        """Backward, reduction and optimizer step."""
        scale = self.scaler.scale if self.scaler else 1.0
        sums, priorities = self._backward.run(batch, version, timer, self._target, scale)
        names = list(sums)
        buffer = torch.cat([self.flat.grad, torch.stack([sums[name] for name in names])])
        self._data_parallel.sum_(buffer)
        timer.mark("all_reduce")
        size = self.flat.grad.numel()
        totals = dict(zip(names, buffer[size:].tolist(), strict=True))
        count = totals.pop("count")
        self.flat.grad.copy_(buffer[:size]).div_(max(count, 1.0))
        result = self._apply(totals, count, agent_steps)
        timer.mark("optimizer")
        return result if priorities is None else result._replace(priorities=priorities)

    @torch.no_grad()
    def _update_target(self, version: int) -> None:
        # Before the step and at version 0, too, so a resumed run copies when this one would.
        if self._target is not None and version % self._brain.target_update_steps == 0:
            self._target_flat.value.copy_(self.flat.value)

    def _apply(self, totals: dict[str, float], count: float, agent_steps: int) -> StepResult:
        loss, lag = totals.pop("loss"), totals.pop("policy_lag")
        lag_rows = totals.pop("policy_lag_rows")
        if not np.isfinite(loss):
            raise NonFiniteLossError(explain_non_finite("loss", loss, agent_steps))
        norm = 0.0
        skipped = self.scaler is not None and not self.scaler.unscale_(self.flat.grad)
        if not skipped:
            if not bool(torch.isfinite(self.flat.grad.sum())):
                raise NonFiniteLossError(explain_non_finite("gradient", float("nan"), agent_steps))
            norm = float(self.optimizer.step(agent_steps))
        values = self._brain.summarize(totals, count)
        values |= {
            "loss": loss / max(count, 1.0),
            "policy_lag": lag / max(lag_rows, 1.0),
            "grad_norm": norm,
            "learning_rate": self.optimizer.learning_rate(agent_steps),
        }
        return StepResult(int(count), values, skipped)


@torch.no_grad()
def load_model(flat: FlatParameters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy parameters by name into a network's flat buffer.

    Raises:
      ValueError: names or shapes differ: they belong to another network.
    """
    views = flat.named(flat.value)
    want = {name: tuple(view.shape) for name, view in views.items()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if want != got:
        differing = sorted(dict(want.items() ^ got.items()))
        raise ValueError(
            f"the checkpoint is of another network: {len(differing)} parameters differ, "
            f"the first are {differing[:4]}"
        )
    for name, view in views.items():
        view.copy_(tensors[name])


def _other_kind(section: str, has: bool) -> str:
    """Say what a checkpoint with or without a loss scale or target network means."""
    if section == "scaler":
        was = "float16" if has else "a precision other than float16"
        return f"the checkpoint was trained with learner.precision {was}, and this run is not"
    return f"the checkpoint has {'a' if has else 'no'} target network: it is of another agent"
