"""How agents with a policy and a value act, and what they record for their losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpcrl.agents import ActOutput
from hpcrl.checks import check_shape
from hpcrl.config.sections import NetworkConfig
from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ArraySpec, EnvSpec
from hpcrl.types import NetInputs


def behaviour_spec() -> dict[str, ArraySpec]:
    """Return the arrays recorded per row.

    `log_prob` of the action under the policy that chose it is all that the loss needs of the
    behaviour policy; it is recorded per row, as the weights may change inside an unroll.
    `value` is for recordings, and for agents whose learners see no other weights than those
    that acted.
    """
    return {"log_prob": ArraySpec((), "float32"), "value": ArraySpec((), "float32")}


def network_settings(network: NetworkConfig) -> dict[str, Any]:
    """Return the keywords of `ActorCritic` that the configuration gives."""
    return {
        "torso": network.torso,
        "hidden_sizes": network.hidden_sizes,
        "activation": network.activation,
        "shared_torso": network.shared_torso,
        "core": network.core,
        "core_size": network.core_size,
        "use_previous_action": network.use_previous_action,
        "use_previous_reward": network.use_previous_reward,
        "previous_reward_clip": network.previous_reward_clip,
        "state_independent_std": network.state_independent_std,
    }


def make_network(
    env: EnvSpec, distribution: ActionDistribution, network: NetworkConfig, config: Any
) -> ActorCritic:
    """Build the actor-critic; see `agents.Agent.make_network`."""
    return ActorCritic(env, distribution, **network_settings(network))


def exploration(env_ids: npt.NDArray[np.int64], num_envs: int, config: Any) -> None:
    """Return None: the policy itself explores."""


@torch.inference_mode()
def act(
    net: nn.Module,
    distribution: ActionDistribution,
    inputs: NetInputs,
    core_state: Tensor,
    generator: torch.Generator | None = None,
    greedy: bool = False,
    epsilon: Tensor | None = None,
) -> ActOutput:
    """Choose an action for each of N rows.

    Args:
      net: an actor-critic network.
      distribution: of actions, given the network's policy output.
      inputs: `[1, N, ...]`.
      core_state: `<float32>[N, S]`, before this step.
      generator: random stream; torch's default when absent.
      greedy: take the distribution's mode instead of a sample.
      epsilon: not used; the policy itself explores.

    Returns:
      Actions, the arrays of `behaviour_spec`, and the state after this step.

    Raises:
      ValueError: `inputs` holds more than one step.
    """
    check_shape("inputs.start", inputs.start, 1, len(core_state))
    outputs, next_state = net(inputs, core_state)
    policy = outputs.policy[0]
    action = distribution.mode(policy) if greedy else distribution.sample(policy, generator)
    behaviour = {
        "log_prob": distribution.log_prob(policy, action),
        "value": outputs.value[0],
    }
    return ActOutput(action, behaviour, next_state)
