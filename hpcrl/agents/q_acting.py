"""How agents that learn action values act, and what they record for initial priorities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpcrl.agents import ActOutput
from hpcrl.agents.q_learning import QLearningConfig
from hpcrl.checks import check_shape
from hpcrl.config.sections import NetworkConfig
from hpcrl.nets.q_network import QNetwork
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.ops.exploration import Exploration, explore
from hpcrl.ops.q_targets import of_action
from hpcrl.specs import ArraySpec, EnvSpec
from hpcrl.types import NetInputs


def behaviour_spec() -> dict[str, ArraySpec]:
    """Return the arrays recorded per row: values of the action taken and of the GREEDY one.

    A target that bootstraps from the value of an action taken at random would be another
    algorithm's, so the greedy value is recorded where the values are at hand.
    """
    return {"q_action": ArraySpec((), "float32"), "q_greedy": ArraySpec((), "float32")}


def make_network(
    env: EnvSpec, distribution: ActionDistribution, network: NetworkConfig, config: QLearningConfig
) -> QNetwork:
    """Build the dueling network; see `agents.Agent.make_network`."""
    if not network.shared_torso:
        raise ValueError(
            "network.shared_torso false: the streams of a dueling network share their torso"
        )
    return QNetwork(
        env,
        head_size=config.head_size,
        torso=network.torso,
        hidden_sizes=network.hidden_sizes,
        activation=network.activation,
        core=network.core,
        core_size=network.core_size,
        use_previous_action=network.use_previous_action,
        use_previous_reward=network.use_previous_reward,
        previous_reward_clip=network.previous_reward_clip,
    )


def exploration(
    env_ids: npt.NDArray[np.int64], num_envs: int, config: QLearningConfig
) -> Exploration:
    """Return the epsilon of each environment; see `ops.exploration.explore`."""
    return explore(env_ids, num_envs, config.evaluation_envs, config.evaluation_epsilon)


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
    """Choose an action for each of N rows, epsilon-greedily.

    Args:
      net: an action-value network.
      distribution: not used.
      inputs: `[1, N, ...]`.
      core_state: `<float32>[N, S]`, before this step.
      generator: random stream; torch's default when absent.
      greedy: take the best action everywhere.
      epsilon: `<float32>[N]`, probability of an action at random; None: 0.

    Returns:
      Actions, the arrays of `behaviour_spec`, and the state after this step.

    Raises:
      ValueError: shapes do not fit.
    """
    num_rows = len(core_state)
    check_shape("inputs.start", inputs.start, 1, num_rows)
    outputs, next_state = net(inputs, core_state)
    q = outputs[0]
    q_greedy, action = q.max(-1)
    if epsilon is not None and not greedy:
        check_shape("epsilon", epsilon, num_rows)
        draw = torch.rand(num_rows, generator=generator, device=q.device)
        other = torch.randint(q.shape[-1], (num_rows,), generator=generator, device=q.device)
        action = torch.where(draw < epsilon, other, action)
    action = action[:, None]
    behaviour = {"q_action": of_action(q, action), "q_greedy": q_greedy}
    return ActOutput(action.to(torch.int32), behaviour, next_state)
