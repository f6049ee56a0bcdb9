"""PPO's loss and gradient against a case derived by hand, and the preparation of its rows."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.agents.ppo.loss import loss, prepare, summarize
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ActionPart, ActionSpec
from hpcrl.types import NetOutputs, UnrollBatch

DISTRIBUTION = ActionDistribution(ActionSpec((ActionPart("discrete", (2,)),)))


class Table(nn.Module):
    """One logit difference and one value for each row: the gradient is read off directly."""

    def __init__(self, logit, value):
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(logit, dtype=torch.float32))
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float32))

    def forward(self, inputs, core_state):
        zeros = torch.zeros_like(self.logit)
        policy = torch.stack([zeros, self.logit], -1)[None]
        return NetOutputs(policy, self.value[None]), core_state


def rows(action, log_mu, advantage, target, value, final=None):
    """A prepared batch of one time step."""
    n = len(action)
    false = torch.zeros(1, n, dtype=torch.bool)
    flat = {"log_prob": log_mu, "advantage": advantage, "value_target": target, "value": value}
    return UnrollBatch(
        observation={"obs": torch.zeros(1, n, 1)},
        reward=torch.zeros(1, n),
        terminated=false,
        start=false,
        final=false if final is None else torch.tensor([final]),
        previous_action=torch.zeros(1, n, 1, dtype=torch.int32),
        action=torch.tensor(action, dtype=torch.int32)[None, :, None],
        behaviour={k: torch.tensor(v, dtype=torch.float32)[None] for k, v in flat.items()},
        policy_version=torch.zeros(1, n, dtype=torch.int64),
        core_state=torch.zeros(n, 0),
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Four rows of action 1 with pi = sigmoid(x), mu = 0.5: inside the bounds; above them with a
# positive and with a negative advantage; below them with a positive one.
LOGITS = [0.1, 2.0, 2.0, -2.0]
ADVANTAGES = [1.5, 1.0, -2.0, 3.0]
EPSILON, VALUE_COST, ENTROPY_COST = 0.2, 0.7, 0.03
VALUES, TARGETS = [0.5, 1.0, -1.0, 0.0], [1.0, 0.0, -1.0, 2.0]


def by_hand():
    """Loss, d loss / d logit and d loss / d value from the definitions."""
    total, grad_logit, grad_value = 0.0, [], []
    for x, a, v, g in zip(LOGITS, ADVANTAGES, VALUES, TARGETS, strict=True):
        p = sigmoid(x)
        r = p / 0.5
        clipped = min(max(r, 1 - EPSILON), 1 + EPSILON)
        total -= min(r * a, clipped * a)
        # d p / d x = p (1 - p); the clipped branch is constant.
        slope = -a * p * (1 - p) / 0.5 if r * a <= clipped * a else 0.0
        entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
        total += VALUE_COST * 0.5 * (g - v) ** 2 - ENTROPY_COST * entropy
        # d H / d x = -x p (1 - p) for a Bernoulli variable with logit x.
        grad_logit.append(slope + ENTROPY_COST * x * p * (1 - p))
        grad_value.append(VALUE_COST * (v - g))
    return total, grad_logit, grad_value


def config(**settings):
    return PPOConfig(
        clip_ratio=EPSILON, value_cost=VALUE_COST, entropy_cost=ENTROPY_COST, **settings
    )


def test_loss_and_gradient_are_those_derived_by_hand():
    net = Table(LOGITS, VALUES)
    batch = rows([1] * 4, [math.log(0.5)] * 4, ADVANTAGES, TARGETS, VALUES)
    out = loss(net, DISTRIBUTION, batch, config())
    out.loss_sum.backward()
    total, grad_logit, grad_value = by_hand()
    assert out.count == 4
    assert out.loss_sum.item() == pytest.approx(total, abs=1e-5)
    np.testing.assert_allclose(net.logit.grad, grad_logit, atol=1e-6)
    np.testing.assert_allclose(net.value.grad, grad_value, atol=1e-6)
    # Row 1 is cut by the upper bound and row 3, with pi far below mu, is not: both are beyond.
    assert grad_logit[1] == pytest.approx(ENTROPY_COST * 2.0 * sigmoid(2) * sigmoid(-2))
    assert out.metrics["ratio_clipped"] == 3


def test_rows_that_are_not_real_leave_no_trace():
    net = Table(LOGITS, VALUES)
    advantages, targets = [*ADVANTAGES[:3], math.nan], [*TARGETS[:3], math.inf]
    batch = rows(
        [1] * 4, [math.log(0.5)] * 4, advantages, targets, VALUES, [False, False, False, True]
    )
    out = loss(net, DISTRIBUTION, batch, config(value_clip=0.1))
    out.loss_sum.backward()
    assert out.count == 3
    assert all(torch.isfinite(v) for v in out.metrics.values())
    assert net.logit.grad[3] == 0
    assert net.value.grad[3] == 0


def test_value_clip_takes_the_larger_error():
    # Old value 0, bound 0.5. Row 0: V = 2 beyond the bound, G = 3: errors 1 and 2.5, the
    # clipped one is larger and has no gradient. Row 1: V = 2, G = -1: errors 3 and 1.5.
    net = Table([0.0, 0.0], [2.0, 2.0])
    batch = rows([0, 0], [math.log(0.5)] * 2, [0.0, 0.0], [3.0, -1.0], [0.0, 0.0])
    settings = PPOConfig(value_clip=0.5, value_cost=1.0, entropy_cost=0.0)
    out = loss(net, DISTRIBUTION, batch, settings)
    out.loss_sum.backward()
    assert out.metrics["value_loss"].item() == pytest.approx(0.5 * (2.5**2 + 3.0**2))
    assert net.value.grad.tolist() == pytest.approx([0.0, 3.0])


def unroll(over):
    """Rows 0..4: the action of row 0 truncates (row 1 final), that of row 3 terminates."""

    def column(*values):
        return torch.tensor(values)[:, None]

    return prepare(
        UnrollBatch(
            observation={"obs": torch.arange(5.0)[:, None, None]},
            reward=column(9.0, 1.0, 0.0, 2.0, 3.0),
            terminated=column(False, False, False, False, True),
            start=column(True, False, True, False, True),
            final=column(False, True, False, False, False),
            previous_action=torch.zeros(5, 1, 1, dtype=torch.int32),
            action=torch.arange(5, dtype=torch.int32)[:, None, None],
            behaviour={
                "log_prob": torch.zeros(5, 1),
                "value": column(0.5, 0.25, 1.0, 2.0, 100.0),
            },
            policy_version=torch.full((5, 1), 7),
            core_state=torch.zeros(1, 0),
        ),
        PPOConfig(discount=0.9, lambda_=0.5, minibatch_over=over),
    )


# Row 0 bootstraps from the last observation's value; row 3's termination hides row 4's 100.
ADVANTAGE_0 = 1.0 + 0.9 * 0.25 - 0.5
ADVANTAGE_3 = 3.0 - 2.0
ADVANTAGE_2 = 2.0 + 0.9 * 2.0 - 1.0 + 0.9 * 0.5 * ADVANTAGE_3


def test_preparation_of_unrolls_is_the_literal_estimate_of_their_transitions():
    batch = unroll("unrolls")
    advantage = batch.behaviour["advantage"][:, 0].tolist()
    assert advantage == pytest.approx([ADVANTAGE_0, 0.0, ADVANTAGE_2, ADVANTAGE_3])
    target = batch.behaviour["value_target"][:, 0]
    assert target[[0, 2, 3]].tolist() == pytest.approx(
        [ADVANTAGE_0 + 0.5, ADVANTAGE_2 + 1.0, ADVANTAGE_3 + 2.0]
    )
    assert batch.reward.shape == (4, 1)


def test_preparation_of_transitions_leaves_those_that_are_real():
    batch = unroll("transitions")
    assert batch.action[0, :, 0].tolist() == [0, 2, 3]
    assert batch.observation["obs"][0, :, 0].tolist() == [0.0, 2.0, 3.0]
    assert not batch.final.any()
    assert batch.core_state.shape == (3, 0)
    assert batch.behaviour["advantage"][0].tolist() == pytest.approx(
        [ADVANTAGE_0, ADVANTAGE_2, ADVANTAGE_3]
    )


def test_figures_are_means_over_rows():
    net = Table([1.0, 1.0], [0.0, 1.0])
    batch = rows([1, 1], [math.log(0.5)] * 2, [1.0, 1.0], [1.0, 3.0], [0.0, 0.0])
    out = loss(net, DISTRIBUTION, batch, config())
    means = summarize({n: v.item() for n, v in out.metrics.items()}, 2.0)
    ratio = sigmoid(1.0) / 0.5
    assert means["kl"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
    assert means["value_target"] == pytest.approx(2.0)
    # Errors 1 and 2 vary by 1/4, targets 1 and 3 by 1.
    assert means["explained_variance"] == pytest.approx(0.75)
