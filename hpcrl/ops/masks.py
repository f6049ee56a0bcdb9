"""From the rows of an unroll to its transitions: which are real, and their discount.

An unroll of T+1 rows holds T transitions: transition t starts at row t (observation and
action) and ends at row t+1 (reward, termination, next observation). With T = 4, gamma 0.9:

Terminated by the action of row 1 (row 2 already shows the next episode):

    row            0      1      2      3      4
    observation    o0     o1     o0'    o1'    o2'
    reward         .      r1     r2     r1'    r2'
    terminated     .      0      1      0      0
    start          .      0      1      0      0
    final          0      0      0      0      0
    transition     0      1      2      3
    real           1      1      1      1
    discount_t     0.9    0      0.9    0.9

Truncated after the action of row 1 (row 2 is the last observation; nothing follows it):

    row            0      1      2      3      4
    observation    o0     o1     o2     o0'    o1'
    reward         .      r1     r2     0      r1'
    terminated     .      0      0      0      0
    start          .      0      0      1      0
    final          0      0      1      0      0
    transition     0      1      2      3
    real           1      1      0      1
    discount_t     0.9    0.9    0.9    0.9     (that of transition 2 has no meaning)

So transition 1 bootstraps from V(o2), and transition 2 must leave no trace in any loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.checks import check_dtype, check_same_shape


class TransitionMasks(NamedTuple):
    """What the T transitions of an unroll are worth.

    Attributes:
      discount_t: `<float32>[T, B]`, discount of what follows transition t: 0 if it
        terminated the episode, else the discount factor.
      real: `<bool>[T, B]`, false where transition t only joins a truncated episode to the
        next one.
    """

    discount_t: Tensor
    real: Tensor


def transition_masks(terminated: Tensor, final: Tensor, discount: float) -> TransitionMasks:
    """Return the discounts and the mask of the transitions between the rows of an unroll.

    Args:
      terminated: `<bool>[T+1, B]`, row t tells of the action at row t-1.
      final: `<bool>[T+1, B]`, row t is the last observation of a truncated episode.
      discount: discount factor per agent step, gamma.

    Returns:
      Masks of the T transitions.

    Raises:
      ValueError: shapes differ.
      TypeError: an argument is not bool.
    """
    check_same_shape(terminated=terminated, final=final)
    check_dtype("terminated", terminated, torch.bool)
    check_dtype("final", final, torch.bool)
    discount_t = (~terminated[1:]).to(torch.float32).mul_(discount)
    return TransitionMasks(discount_t, ~final[:-1])
