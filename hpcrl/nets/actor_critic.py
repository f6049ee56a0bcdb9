"""The actor-critic network: one function for acting (T = 1) and learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hpcrl.checks import check_shape
from hpcrl.nets.encoder import Torso
from hpcrl.nets.network import Network
from hpcrl.nets.torso import Activation, orthogonal
from hpcrl.nets.trunk import Trunk
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import EnvSpec
from hpcrl.types import NetInputs, NetOutputs

POLICY_GAIN, VALUE_GAIN = 0.01, 1.0
"""Gains of the orthogonal initialization of the heads: the first policy is near uniform."""


class ActorCritic(Network):
    """Encoder, optional previous action and reward, optional core; policy and value heads.

    Convolutions keep their weights channels-last, which is the faster order on CPUs and on
    tensor cores. The heads run in float32 even under autocast.

    Attributes:
      state_size: S, length of the flat recurrent state; 0 without a core.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        distribution: ActionDistribution,
        *,
        torso: Torso = "mlp",
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = "relu",
        shared_torso: bool = True,
        core: Literal["none", "lstm"] = "none",
        core_size: int = 256,
        use_previous_action: bool = False,
        use_previous_reward: bool = False,
        previous_reward_clip: float = 1.0,
        state_independent_std: bool = False,
    ):
        """Build the network with torch's default random stream.

        Args:
          env_spec: observation leaves and action parts.
          distribution: whose parameters the policy head gives.
          torso: of image leaves; mlp flattens them.
          hidden_sizes: dense layers after the torso.
          activation: of the dense layers.
          shared_torso: whether policy and value share everything but the heads.
          core: recurrent core.
          core_size: units of the core.
          use_previous_action: feed the previous action to core or heads.
          use_previous_reward: feed the previous reward to core or heads.
          previous_reward_clip: largest magnitude of the reward fed; 0: not clipped.
          state_independent_std: make log standard deviations parameters of their own.

        Raises:
          ValueError: the torso does not fit the observation.
        """
        super().__init__()
        trunks = [
            Trunk(
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
            for _ in range(1 if shared_torso else 2)
        ]
        self.trunks = nn.ModuleList(trunks)
        self._state_sizes = [trunk.state_size for trunk in trunks]
        self.state_size = sum(self._state_sizes)
        size = trunks[0].output_size
        self.policy = _PolicyHead(size, distribution, state_independent_std)
        self.value = orthogonal(nn.Linear(size, 1), VALUE_GAIN)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: NetInputs, core_state: Tensor) -> tuple[NetOutputs, Tensor]:
        """Evaluate rows in order of time.

        Args:
          inputs: `[T, B, ...]`.
          core_state: `<float32>[B, S]`, before row 0.

        Returns:
          Outputs of every row, float32, and the state after the last row, `[B, S]`.

        Raises:
          ValueError: shapes do not fit.
        """
        check_shape("core_state", core_state, inputs.start.shape[1], self.state_size)
        states = core_state.split(self._state_sizes, -1)
        pairs = [trunk(inputs, state) for trunk, state in zip(self.trunks, states, strict=True)]
        with torch.autocast(core_state.device.type, enabled=False):
            policy = self.policy(pairs[0][0].float())
            value = self.value(pairs[-1][0].float())[..., 0]
        next_state = pairs[0][1] if len(pairs) == 1 else torch.cat([s for _, s in pairs], -1)
        return NetOutputs(policy, value), next_state


class _PolicyHead(nn.Module):
    """Linear, except for log standard deviations that do not depend on the state."""

    _order: Tensor

    def __init__(self, size: int, distribution: ActionDistribution, state_independent_std: bool):
        super().__init__()
        num_params = distribution.num_params
        free = list(distribution.log_std_params) if state_independent_std else []
        linear_params = [i for i in range(num_params) if i not in set(free)]
        self.linear = orthogonal(nn.Linear(size, len(linear_params)), POLICY_GAIN)
        self.log_std = nn.Parameter(torch.zeros(len(free))) if free else None
        order = torch.tensor(linear_params + free).argsort()
        self.register_buffer("_order", order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        params = self.linear(x)
        if self.log_std is None:
            return params
        log_std = self.log_std.expand(*params.shape[:-1], -1)
        return torch.cat([params, log_std], -1)[..., self._order]
