"""Flat parameters and gradients, and the optimizers that work on them.

All parameters lie in one buffer and all gradients in another, so an all-reduce, a clip, an
optimizer step and a publication of weights are each a few operations on one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from hpcrl.config.sections import OptimizerConfig

_ALIGNMENT = 16
"""Parameters begin at multiples of 16 floats, a cache line; the gaps are and stay zero."""


class FlatParameters:
    """Turns a module's parameters and gradients into views of two flat float32 buffers.

    Each parameter keeps its strides, so a channels-last convolution stays channels-last, and
    the order within the buffers is that of the module's construction: modules built alike
    share one layout, which `names` describes.

    Gradients accumulate into `grad`; zero it with `zero_grad` of this class, or the module's
    with `set_to_none=False`, as `None` would cut the views loose.

    Attributes:
      value: `<float32>[size]`, the parameters.
      grad: `<float32>[size]`, their gradients.
    """

    def __init__(self, module: nn.Module):
        """Move the module's parameters into a flat buffer, on their device.

        Args:
          module: to flatten, already on its device and in its memory format.

        Raises:
          TypeError: a parameter is not float32.
          ValueError: a parameter is not dense in memory, or devices differ.
        """
        self._parameters = dict(module.named_parameters())
        self._offsets: dict[str, int] = {}
        size = 0
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise TypeError(f"{name}: parameters must be float32, got {parameter.dtype}")
            if not _is_dense(parameter):
                raise ValueError(
                    f"{name}: parameters must be dense, got strides {parameter.stride()}"
                )
            self._offsets[name] = size
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        devices = {parameter.device for parameter in self._parameters.values()}
        if len(devices) != 1:
            raise ValueError(f"parameters must be on one device, got {devices}")
        self.value = torch.zeros(size, device=devices.pop())
        self.grad = torch.zeros_like(self.value)
        grads = self.named(self.grad)
        for name, view in self.named(self.value).items():
            parameter = self._parameters[name]
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = grads[name]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat buffer laid out like `value`, by parameter name."""
        return {
            name: flat.as_strided(parameter.shape, parameter.stride(), self._offsets[name])
            for name, parameter in self._parameters.items()
        }

    def zero_grad(self) -> None:
        """Set all gradients to zero; they stay views of `grad`."""
        self.grad.zero_()


class Parameters(Protocol):
    """What an optimizer needs of parameters.

    Attributes:
      value: `<float32>[size]`.
      grad: `<float32>[size]`.
    """

    value: Tensor
    grad: Tensor

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat buffer laid out like `value`, by name."""


def _is_dense(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((length - 1) * stride for length, stride in pairs) == tensor.numel() - 1


@torch.no_grad()
def clip_by_global_norm(flat_grad: Tensor, max_norm: float) -> Tensor:
    """Scale a gradient in place so that its norm is at most `max_norm`.

    Args:
      flat_grad: `<float32>[size]`, the whole gradient, after the reduction over learners.
      max_norm: 0 does not clip.

    Returns:
      `<float32>[]`, the norm before.
    """
    norm = torch.linalg.vector_norm(flat_grad)
    if max_norm > 0:
        flat_grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class Optimizer:
    """Adam or RMSProp on flat buffers; equal to `torch.optim` up to rounding.

    Adam is Kingma & Ba 2015, arXiv:1412.6980, algorithm 1; RMSProp divides by
    sqrt(v) + epsilon (TensorFlow: sqrt(v + epsilon)) and has no centring. For both, epsilon
    is added after the root, for Adam after the bias correction.
    """

    def __init__(self, parameters: Parameters, config: OptimizerConfig, total_agent_steps: int):
        """Start with zero moments.

        Args:
          parameters: what to optimize.
          config: which optimizer, its step size and schedule.
          total_agent_steps: where a linear schedule reaches 0.

        Raises:
          ValueError: a linear schedule has no end.
        """
        if config.schedule == "linear" and total_agent_steps <= 0:
            raise ValueError(
                f"learner.optimizer.schedule is linear, but the run's length is "
                f"{total_agent_steps} agent steps; set stop.agent_steps or stop.frames, where "
                "the learning rate reaches 0"
            )
        self._parameters = parameters
        self._config = config
        self._total_agent_steps = total_agent_steps
        self._step_count = 0
        kinds = ["second_moment"]
        if config.name == "adam":
            kinds.append("first_moment")
        elif config.momentum > 0:
            kinds.append("momentum")
        self._moments = {kind: torch.zeros_like(parameters.value) for kind in kinds}
        self._scratch = torch.empty_like(parameters.value)

    def learning_rate(self, agent_steps: int) -> float:
        """Return the step size once `agent_steps` have been trained on."""
        rate = self._config.learning_rate
        if self._config.schedule == "constant":
            return rate
        return rate * max(0.0, 1.0 - agent_steps / self._total_agent_steps)

    @torch.no_grad()
    def step(self, agent_steps: int) -> Tensor:
        """Clip the gradient to the configured norm and move the parameters.

        Args:
          agent_steps: trained on before this step; sets the learning rate.

        Returns:
          `<float32>[]`, norm of the gradient before clipping.
        """
        norm = clip_by_global_norm(self._parameters.grad, self._config.max_grad_norm)
        self._step_count += 1
        rate = self.learning_rate(agent_steps)
        if self._config.name == "adam":
            self._adam(rate)
        else:
            self._rmsprop(rate)
        return norm

    def _adam(self, rate: float) -> None:
        config, grad = self._config, self._parameters.grad
        first, second = self._moments["first_moment"], self._moments["second_moment"]
        first.lerp_(grad, 1 - config.beta1)
        second.mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
        correction1 = 1 - config.beta1**self._step_count
        correction2 = 1 - config.beta2**self._step_count
        root = torch.sqrt(second, out=self._scratch)
        root.div_(correction2**0.5).add_(config.epsilon)
        self._parameters.value.addcdiv_(first, root, value=-rate / correction1)

    def _rmsprop(self, rate: float) -> None:
        config, grad = self._config, self._parameters.grad
        second = self._moments["second_moment"]
        second.mul_(config.alpha).addcmul_(grad, grad, value=1 - config.alpha)
        root = torch.sqrt(second, out=self._scratch).add_(config.epsilon)
        if "momentum" not in self._moments:
            self._parameters.value.addcdiv_(grad, root, value=-rate)
            return
        momentum = self._moments["momentum"]
        momentum.mul_(config.momentum).addcdiv_(grad, root)
        self._parameters.value.add_(momentum, alpha=-rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of everything that a resumed run needs, by name; tensors only.

        `step_count` is `<int64>[]`; moments are one tensor per parameter, named
        `<moment>.<parameter>`, so a state does not depend on the flat layout.
        """
        state = {"step_count": torch.tensor(self._step_count)}
        for kind, flat in self._moments.items():
            for name, view in self._parameters.named(flat).items():
                state[f"{kind}.{name}"] = view.clone(memory_format=torch.contiguous_format)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` gave.

        Args:
          state: by name.

        Raises:
          ValueError: names or shapes differ: another optimizer or another network.
        """
        views = {
            f"{kind}.{name}": view
            for kind, flat in self._moments.items()
            for name, view in self._parameters.named(flat).items()
        }
        want = {name: tuple(view.shape) for name, view in views.items()} | {"step_count": ()}
        got = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if want != got:
            differing = sorted(dict(want.items() ^ got.items()))
            raise ValueError(
                f"the optimizer's state is not one of this optimizer and network; "
                f"{len(differing)} entries differ, the first are {differing[:4]}"
            )
        self._step_count = int(state["step_count"])
        for name, view in views.items():
            view.copy_(state[name])
