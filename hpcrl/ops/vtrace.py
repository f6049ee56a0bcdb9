"""V-trace: off-policy corrected value targets and policy gradient advantages.

Source: IMPALA, Espeholt et al. 2018, arXiv:1802.01561, section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.checks import check_dtype, check_same_shape, check_shape


class VTraceReturns(NamedTuple):
    """Targets of one batch of unrolls; neither carries a gradient.

    Attributes:
      vs: `<float32>[T, B]`, the target of the value at row t, v_s of eq. (1).
      pg_advantage: `<float32>[T, B]`, clipped rho times (q_t - V_t), the factor of
        grad log pi(a_t | x_t) in section 4.2.
    """

    vs: Tensor
    pg_advantage: Tensor


@torch.no_grad()
def vtrace(
    log_rho: Tensor,
    discount_t: Tensor,
    reward_t: Tensor,
    value_tm1: Tensor,
    bootstrap_value: Tensor,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """Return V-trace targets, arXiv:1802.01561 eq. (1) in the recursive form of Remark 1.

    With rhoₜ = min(rho_bar, pi/mu) and cₜ = lambda min(c_bar, pi/mu) (Remark 2):

        deltaₜ = rhoₜ (rₜ₊₁ + discountₜ₊₁ V(xₜ₊₁) - V(xₜ))
        vₜ     = V(xₜ) + deltaₜ + discountₜ₊₁ cₜ (vₜ₊₁ - V(xₜ₊₁))
        advₜ   = min(pg_rho_bar, pi/mu) (rₜ₊₁ + discountₜ₊₁ vₜ₊₁ - V(xₜ))

    Row t of every argument belongs to the transition that starts at row t of the unroll:
    its reward and discount are those that arrived at row t+1.

    A transition that is not real is given log_rho = -inf: its target is then its own value
    exactly, its advantage zero, and the row before bootstraps from that value.

    Args:
      log_rho: `<float32>[T, B]`, log of pi(a|x) / mu(a|x); -inf masks.
      discount_t: `<float32>[T, B]`, 0 where the episode terminated.
      reward_t: `<float32>[T, B]`.
      value_tm1: `<float32>[T, B]`, V at the rows where the transitions start.
      bootstrap_value: `<float32>[B]`, V at the row after the last transition.
      rho_bar: clip of the importance weight of the temporal difference; may be inf.
      c_bar: clip of the trace coefficient; may be inf.
      pg_rho_bar: clip of the importance weight of the advantage; may be inf.
      lambda_: multiplies the trace coefficients; 1 gives eq. (1) itself.

    Returns:
      The targets, without gradient.

    Raises:
      ValueError: shapes differ.
      TypeError: an argument is not float32.
    """
    check_same_shape(log_rho=log_rho, discount_t=discount_t, reward_t=reward_t, value_tm1=value_tm1)
    num_steps, batch_size = log_rho.shape
    check_shape("bootstrap_value", bootstrap_value, batch_size)
    for name, array in (
        ("log_rho", log_rho),
        ("discount_t", discount_t),
        ("reward_t", reward_t),
        ("value_tm1", value_tm1),
        ("bootstrap_value", bootstrap_value),
    ):
        check_dtype(name, array, torch.float32)

    rho = log_rho.exp()
    value_t = torch.cat([value_tm1[1:], bootstrap_value[None]])
    delta = rho.clamp(max=rho_bar) * (reward_t + discount_t * value_t - value_tm1)
    trace = discount_t * (rho.clamp(max=c_bar) * lambda_)

    correction = torch.empty_like(delta)  # v - V
    following = torch.zeros_like(bootstrap_value)
    for t in range(num_steps - 1, -1, -1):
        following = torch.addcmul(delta[t], trace[t], following, out=correction[t])
    vs = value_tm1 + correction

    vs_t = torch.cat([vs[1:], bootstrap_value[None]])
    pg_advantage = rho.clamp(max=pg_rho_bar) * (reward_t + discount_t * vs_t - value_tm1)
    return VTraceReturns(vs, pg_advantage)
