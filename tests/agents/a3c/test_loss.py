"""The A3C loss against a derivation by hand, and what must leave no trace in it."""

import numpy as np
import pytest
import torch

from hpcrl.agents.a3c.config import A3CConfig
from hpcrl.agents.a3c.loss import METRICS, loss, summarize
from tests.agents.vtrace.test_loss import DISTRIBUTION, NUM_ACTIONS, LinearNet, random_batch

CONFIG = A3CConfig(discount=0.9, value_cost=0.6, entropy_cost=0.05, reward_clip=1.5)


def returns_of(reward, discount, real, values, n_steps):
    """n-step returns of one unroll, each from its definition."""
    num_steps = len(reward)
    found = np.zeros(num_steps)
    for t in range(num_steps):
        factor = 1.0
        for k in range(t, num_steps):
            if not real[k] or k - t == n_steps:
                found[t] += factor * values[k]
                break
            found[t] += factor * reward[k]
            factor *= discount[k]
        else:
            found[t] += factor * values[num_steps]
    return found


def loss_and_gradient_by_hand(net, batch, config):
    """The loss and its gradient for a softmax of W x and a value v x.

    d(-A log pi(a))/dW = -A (1_a - pi) x
    d((G - v x)^2 / 2)/dv = -(G - v x) x
    d(-H)/dW = pi (log pi + H) x
    """
    policy, value = (p.detach().double().numpy() for p in (net.policy, net.value))
    x = batch.observation[""].double().numpy()
    total, policy_grad, value_grad = 0.0, np.zeros_like(policy), np.zeros_like(value)
    for b in range(x.shape[1]):
        logits = x[:-1, b] @ policy.T
        pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        action = batch.action[:-1, b, 0].numpy()
        real = ~batch.final[:-1, b].numpy()
        discount = config.discount * (1 - batch.terminated[1:, b].numpy())
        reward = np.clip(batch.reward[1:, b].numpy(), -config.reward_clip, config.reward_clip)
        values = x[:, b] @ value
        found = returns_of(reward, discount, real, values, config.n_steps or len(reward))
        for t in np.flatnonzero(real):
            error = found[t] - values[t]
            entropy = -(pi[t] * np.log(pi[t])).sum()
            total -= error * np.log(pi[t, action[t]])
            total += config.value_cost * 0.5 * error**2 - config.entropy_cost * entropy
            d_logits = -error * (np.eye(NUM_ACTIONS)[action[t]] - pi[t])
            d_logits += config.entropy_cost * pi[t] * (np.log(pi[t]) + entropy)
            policy_grad += d_logits[:, None] * x[t, b]
            value_grad -= config.value_cost * error * x[t, b]
    return total, policy_grad, value_grad


@pytest.mark.parametrize("n_steps", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_those_derived_by_hand(seed, n_steps):
    config = A3CConfig(**{**vars(CONFIG), "n_steps": n_steps})
    net, batch = LinearNet(seed), random_batch(seed=seed)
    assert batch.final[:-1].any()
    assert batch.terminated[1:].any()
    want_loss, want_policy, want_value = loss_and_gradient_by_hand(net, batch, config)
    output = loss(net, DISTRIBUTION, batch, config)
    assert output.loss_sum.item() == pytest.approx(want_loss, rel=1e-4)
    grads = torch.autograd.grad(output.loss_sum, [net.policy, net.value])
    np.testing.assert_allclose(grads[0], want_policy, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(grads[1], want_value, rtol=1e-3, atol=1e-4)


def test_a_transition_that_is_not_real_leaves_no_trace():
    net, batch = LinearNet(), random_batch(seed=3)
    output = loss(net, DISTRIBUTION, batch, CONFIG)
    assert output.count == (~batch.final[:-1]).sum()
    changed = batch.reward.clone()
    changed[1:][batch.final[:-1]] = 1.0  # the reward of a step that was never made
    action = batch.action.clone()
    action[batch.final] = 0
    other = loss(net, DISTRIBUTION, batch._replace(reward=changed, action=action), CONFIG)
    assert other.loss_sum.item() == pytest.approx(output.loss_sum.item(), rel=1e-6)


def test_figures_are_means_over_real_transitions():
    net, batch = LinearNet(1), random_batch(seed=1)
    output = loss(net, DISTRIBUTION, batch, CONFIG)
    assert tuple(output.metrics) == METRICS
    count = float(output.count)
    sums = {name: float(value) for name, value in output.metrics.items()}
    figures = summarize(sums, count)
    assert figures["entropy"] == pytest.approx(sums["entropy"] / count)
    targets, errors = [], []
    values = net(type("I", (), {"observation": batch.observation}), None)[0].value
    for b in range(batch.reward.shape[1]):
        real = ~batch.final[:-1, b].numpy()
        discount = CONFIG.discount * (1 - batch.terminated[1:, b].numpy())
        reward = np.clip(batch.reward[1:, b].numpy(), -1.5, 1.5)
        column = values[:, b].detach().numpy()
        found = returns_of(reward, discount, real, column, len(reward))
        targets += found[real].tolist()
        errors += (found - column[:-1])[real].tolist()
    want = 1 - np.var(errors) / np.var(targets)
    assert figures["explained_variance"] == pytest.approx(want, abs=1e-4)
    assert figures["advantage"] == pytest.approx(np.mean(errors), abs=1e-5)
