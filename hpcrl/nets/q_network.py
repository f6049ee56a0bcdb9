"""The dueling action-value network: one function for acting (T = 1) and learning.

Source: dueling heads, Wang et al. 2016, arXiv:1511.06581, eq. (9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hpcrl.checks import check_shape
from hpcrl.nets.encoder import Torso
from hpcrl.nets.network import Network
from hpcrl.nets.torso import Activation
from hpcrl.nets.trunk import Trunk
from hpcrl.specs import EnvSpec
from hpcrl.types import NetInputs


class QNetwork(Network):
    """A trunk, and two streams over its features: the state's value and the advantages.

    The streams run in float32 even under autocast.

    Attributes:
      state_size: S, length of the flat recurrent state; 0 without a core.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        head_size: int = 512,
        torso: Torso = "mlp",
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "relu",
        core: Literal["none", "lstm"] = "none",
        core_size: int = 512,
        use_previous_action: bool = False,
        use_previous_reward: bool = False,
        previous_reward_clip: float = 0.0,
    ):
        """Build the network with torch's default random stream.

        Args:
          env_spec: observation leaves and action parts.
          head_size: units of each stream's hidden layer.
          torso: of image leaves; mlp flattens them.
          hidden_sizes: dense layers after the torso.
          activation: of the dense layers.
          core: recurrent core.
          core_size: units of the core.
          use_previous_action: feed the previous action to core or streams.
          use_previous_reward: feed the previous reward to core or streams.
          previous_reward_clip: largest magnitude of the reward fed; 0: not clipped.

        Raises:
          ValueError: the action is not one choice, or the torso does not fit the observation.
        """
        super().__init__()
        self.trunk = Trunk(
            env_spec,
            torso=torso,
            hidden_sizes=hidden_sizes,
            activation=activation,
            core=core,
            core_size=core_size,
            use_previous_action=use_previous_action,
            use_previous_reward=use_previous_reward,
            previous_reward_clip=previous_reward_clip,
        )
        self.state_size = self.trunk.state_size
        size, actions = self.trunk.output_size, num_actions(env_spec)
        self.value = _stream(size, head_size, 1, bias=True)
        # A bias of all advantages alike would vanish in the subtraction of their mean.
        self.advantage = _stream(size, head_size, actions, bias=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: NetInputs, core_state: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate rows in order of time.

        Args:
          inputs: `[T, B, ...]`.
          core_state: `<float32>[B, S]`, before row 0.

        Returns:
          Action values `<float32>[T, B, actions]`, and the state after the last row, `[B, S]`.

        Raises:
          ValueError: shapes do not fit.
        """
        check_shape("core_state", core_state, inputs.start.shape[1], self.state_size)
        features, next_state = self.trunk(inputs, core_state)
        with torch.autocast(core_state.device.type, enabled=False):
            features = features.float()
            advantage = self.advantage(features)
            q = self.value(features) + advantage - advantage.mean(-1, keepdim=True)
        return q, next_state


def num_actions(env_spec: EnvSpec) -> int:
    """Return how many actions there are to choose from.

    Raises:
      ValueError: the action is not one discrete choice.
    """
    parts = env_spec.action.parts
    if len(parts) != 1 or parts[0].kind != "discrete" or len(parts[0].nvec) != 1:
        kinds = [f"{part.kind}{list(part.nvec)}" for part in parts]
        raise ValueError(
            f"{env_spec.name} has actions of parts {kinds}; agents that learn action values need "
            "one discrete choice"
        )
    return parts[0].nvec[0]


def _stream(size: int, head_size: int, outputs: int, bias: bool) -> nn.Sequential:
    hidden, last = nn.Linear(size, head_size), nn.Linear(head_size, outputs, bias=bias)
    for layer in (hidden, last):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return nn.Sequential(hidden, nn.ReLU(), last)
