"""The arrays that flow through the system, and their time semantics.

Time semantics, true everywhere in hpcrl. Row t of an unroll holds `observation_t` (what
the policy sees now), `reward_t` and `terminated_t` (results of the PREVIOUS action), and
`action_t` (chosen from `observation_t`). So action_t pairs with reward and termination at
t+1. `start_t` says that `observation_t` is the first of an episode: the recurrent state
and the frame stack are reset BEFORE it. When an episode was truncated, its last
observation becomes a row of its own with `final_t` true: no action follows from it, its
transition to row t+1 (the next episode's first, `start` true, reward 0) is not real and is
masked from every loss; it is there so that the row before can bootstrap from it. When an
episode terminated there is no such row. An unroll has T+1 rows; row T is only a
bootstrap and is row 0 of the next unroll.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""numpy.ndarray or torch.Tensor."""


class UnrollBatch(NamedTuple):
    """B unrolls, time first, as a learner sees them (torch tensors).

    Attributes:
      observation: leaves by path, `[T+1, B, ...]`; stacked leaves are
        `[T+1, B, stack, ...]`, zero before the episode's start.
      reward: `<float32>[T+1, B]`, unclipped, result of the previous action.
      terminated: `<bool>[T+1, B]`.
      start: `<bool>[T+1, B]`.
      final: `<bool>[T+1, B]`.
      previous_action: `[T+1, B, A]`.
      action: `[T+1, B, A]`, chosen by the behaviour policy.
      behaviour: what the acting side recorded per row, agent-specific, `[T+1, B, ...]`; of
        sequences sampled from a replay `weight`, their importance weights, in all rows alike.
      policy_version: `<int64>[T+1, B]`, version of the weights that chose the action.
      core_state: `<float32>[B, S]`, recurrent state BEFORE row 0 (S may be 0).
    """

    observation: dict[str, Array]
    reward: Array
    terminated: Array
    start: Array
    final: Array
    previous_action: Array
    action: Array
    behaviour: dict[str, Array]
    policy_version: Array
    core_state: Array


class NetInputs(NamedTuple):
    """What a network sees, `[T, B, ...]`; one function serves acting (T=1) and learning."""

    observation: dict[str, Array]
    reward: Array
    previous_action: Array
    start: Array


class NetOutputs(NamedTuple):
    """What an actor-critic network gives.

    Attributes:
      policy: `<float32>[T, B, P]`, distribution parameters.
      value: `<float32>[T, B]`.
    """

    policy: Array
    value: Array
