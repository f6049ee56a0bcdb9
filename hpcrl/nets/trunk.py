"""What all networks share: from one row's inputs to the features that their heads read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hpcrl.nets.core import LSTMCore, NoCore
from hpcrl.nets.encoder import ObservationEncoder, OneHot, Torso
from hpcrl.nets.torso import Activation
from hpcrl.specs import ActionSpec, EnvSpec
from hpcrl.types import NetInputs


class PreviousAction(nn.Module):
    """Features of an action vector: one-hot categories; numbers scaled to [-1, 1] if bounded.

    Attributes:
      output_size: features per row.
    """

    def __init__(self, action_spec: ActionSpec):
        super().__init__()
        self._sizes = [part.size for part in action_spec.parts]
        codes = [
            OneHot(part.nvec) if part.kind == "discrete" else _ScaledBox(part.low, part.high)
            for part in action_spec.parts
        ]
        self.codes = nn.ModuleList(codes)
        self.output_size = sum(code.output_size for code in codes)

    def forward(self, action: Tensor) -> Tensor:
        """Return `<float32>[..., output_size]` for actions `[..., A]`."""
        parts = action.split(self._sizes, -1)
        return torch.cat([code(x) for code, x in zip(self.codes, parts, strict=True)], -1)


class _ScaledBox(nn.Module):
    _middle: Tensor
    _scale: Tensor

    def __init__(self, low: Sequence[float], high: Sequence[float]):
        super().__init__()
        self.output_size = len(low)
        bounds = [
            ((a + b) / 2, 2 / (b - a)) if math.isfinite(b - a) and b > a else (0.0, 1.0)
            for a, b in zip(low, high, strict=True)
        ]
        middle, scale = zip(*bounds, strict=True)
        self.register_buffer("_middle", torch.tensor(middle), persistent=False)
        self.register_buffer("_scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self._middle) * self._scale


class Trunk(nn.Module):
    """Everything before a head: encoder, optional previous action and reward, optional core.

    Attributes:
      output_size: features per row.
      state_size: S, length of the flat recurrent state; 0 without a core.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        torso: Torso,
        hidden_sizes: Sequence[int],
        activation: Activation,
        core: Literal["none", "lstm"],
        core_size: int,
        use_previous_action: bool,
        use_previous_reward: bool,
        previous_reward_clip: float,
    ):
        super().__init__()
        self.encoder = ObservationEncoder(env_spec.observation, torso, hidden_sizes, activation)
        self.previous_action = PreviousAction(env_spec.action) if use_previous_action else None
        self._reward_clip = previous_reward_clip if use_previous_reward else None
        size = self.encoder.output_size
        size += self.previous_action.output_size if self.previous_action is not None else 0
        size += 1 if use_previous_reward else 0
        self.core = LSTMCore(size, core_size) if core == "lstm" else NoCore(size)
        self.output_size = self.core.output_size
        self.state_size = self.core.state_size

    def forward(self, inputs: NetInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return features `[T, B, output_size]` and the state after the last row, `[B, S]`."""
        # At the first row of an episode the previous action and reward are those of the
        # episode before. Acting sees them, too, so learning must not blank them.
        x = self.encoder(inputs.observation).unflatten(0, inputs.start.shape)  # [T, B, F]
        extras = []
        if self.previous_action is not None:
            extras.append(self.previous_action(inputs.previous_action))
        if self._reward_clip is not None:
            reward = inputs.reward[..., None]
            clip = self._reward_clip or math.inf
            extras.append(reward.clamp(-clip, clip))
        x = torch.cat([x, *extras], -1) if extras else x
        return self.core(x, inputs.start, state)
