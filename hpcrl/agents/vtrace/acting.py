"""How the V-trace agent acts, and what it records for its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcrl.agents import ActOutput
from hpcrl.checks import check_shape
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ArraySpec
from hpcrl.types import NetInputs


def behaviour_spec() -> dict[str, ArraySpec]:
    """Return the arrays recorded per row.

    `log_prob` of the action under the policy that chose it is all that the loss needs of the
    behaviour policy; it is recorded per row, as the weights may change inside an unroll.
    `value` is for recordings.
    """
    return {"log_prob": ArraySpec((), "float32"), "value": ArraySpec((), "float32")}


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
