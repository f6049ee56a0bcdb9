import math

import numpy as np
import pytest
import torch
from torch import nn

from hpcrl.agents.vtrace.config import VTraceConfig
from hpcrl.agents.vtrace.loss import loss, summarize
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ActionPart, ActionSpec
from hpcrl.types import NetOutputs, UnrollBatch

NUM_ACTIONS, NUM_FEATURES = 3, 4
DISTRIBUTION = ActionDistribution(ActionSpec((ActionPart("discrete", nvec=(NUM_ACTIONS,)),)))
CONFIG = VTraceConfig(
    discount=0.9,
    lambda_=0.95,
    rho_bar=1.2,
    c_bar=1.0,
    pg_rho_bar=1.1,
    value_cost=0.6,
    entropy_cost=0.05,
    reward_clip=1.5,
)


class LinearNet(nn.Module):
    """Logits W x and value v x; the inputs that were seen are kept for inspection."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.policy = nn.Parameter(torch.randn(NUM_ACTIONS, NUM_FEATURES, generator=generator))
        self.value = nn.Parameter(torch.randn(NUM_FEATURES, generator=generator))

    def forward(self, inputs, core_state):
        self.inputs, self.core_state = inputs, core_state
        x = inputs.observation[""]
        return NetOutputs(x @ self.policy.T, x @ self.value), core_state


def random_batch(num_steps=6, batch_size=5, seed=0, ends=0.2):
    """Unrolls with terminations (next row starts) and truncations (final row, then start)."""
    rng = np.random.default_rng(seed)
    shape = (num_steps + 1, batch_size)
    terminated, final, start = (np.zeros(shape, bool) for _ in range(3))
    for b in range(batch_size):
        for t in range(1, num_steps + 1):
            if final[t - 1, b]:
                start[t, b] = True
            elif rng.random() < ends:
                terminated[t, b] = start[t, b] = True
            elif rng.random() < ends:
                final[t, b] = True
    reward = rng.normal(size=shape) * 2
    reward[1:][final[:-1]] = 0
    log_prob = np.log(rng.uniform(0.05, 1, shape))
    arrays = {
        "reward": reward.astype(np.float32),
        "terminated": terminated,
        "start": start,
        "final": final,
        "previous_action": rng.integers(0, NUM_ACTIONS, (*shape, 1)).astype(np.int32),
        "action": rng.integers(0, NUM_ACTIONS, (*shape, 1)).astype(np.int32),
        "policy_version": rng.integers(0, 9, shape),
        "core_state": np.zeros((batch_size, 0), np.float32),
    }
    observation = rng.normal(size=(*shape, NUM_FEATURES)).astype(np.float32)
    return UnrollBatch(
        observation={"": torch.from_numpy(observation)},
        behaviour={"log_prob": torch.from_numpy(log_prob.astype(np.float32))},
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
    )


def gradients(net, batch, config=CONFIG):
    output = loss(net, DISTRIBUTION, batch, config)
    return torch.autograd.grad(output.loss_sum, [net.policy, net.value])


def replace(array, index, value):
    array = array.clone()
    array[index] = value
    return array


def numpy_vtrace(log_rho, real, discount, reward, values, config):
    """Targets by the double sum of eq. (1), over real transitions of one unroll."""
    num_steps = len(reward)
    rho = np.where(real, np.minimum(config.rho_bar, np.exp(log_rho)), 0)
    c = np.where(real, config.lambda_ * np.minimum(config.c_bar, np.exp(log_rho)), 0)
    vs = values.copy()
    for s in range(num_steps):
        for t in range(s, num_steps):
            delta = rho[t] * (reward[t] + discount[t] * values[t + 1] - values[t])
            vs[s] += np.prod(discount[s:t] * c[s:t]) * delta
    pg_rho = np.where(real, np.minimum(config.pg_rho_bar, np.exp(log_rho)), 0)
    return vs, pg_rho * (reward + discount * vs[1:] - values[:-1])


def loss_and_gradient_by_hand(net, batch, config):
    """The loss and its gradient, derived on paper for a softmax of W x and a value v x.

    d(-A log pi(a))/dW = -A (1_a - pi) x
    d((v_s - v x)^2 / 2)/dv = -(v_s - v x) x
    d(-H)/dW = pi (log pi + H) x
    """
    policy, value = (p.detach().double().numpy() for p in (net.policy, net.value))
    x = batch.observation[""].double().numpy()
    total, policy_grad, value_grad = 0.0, np.zeros_like(policy), np.zeros_like(value)
    for b in range(x.shape[1]):
        logits = x[:-1, b] @ policy.T
        pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        action = batch.action[:-1, b, 0].numpy()
        log_pi = np.log(pi[np.arange(len(pi)), action])
        real = ~batch.final[:-1, b].numpy()
        discount = config.discount * (1 - batch.terminated[1:, b].numpy())
        reward = np.clip(batch.reward[1:, b].numpy(), -config.reward_clip, config.reward_clip)
        log_rho = log_pi - batch.behaviour["log_prob"][:-1, b].numpy()
        values = x[:, b] @ value
        vs, advantage = numpy_vtrace(log_rho, real, discount, reward, values, config)
        for t in np.flatnonzero(real):
            error = vs[t] - values[t]
            entropy = -(pi[t] * np.log(pi[t])).sum()
            total += -advantage[t] * log_pi[t]
            total += config.value_cost * 0.5 * error**2 - config.entropy_cost * entropy
            one_hot = np.eye(NUM_ACTIONS)[action[t]]
            d_logits = -advantage[t] * (one_hot - pi[t])
            d_logits += config.entropy_cost * pi[t] * (np.log(pi[t]) + entropy)
            policy_grad += d_logits[:, None] * x[t, b]
            value_grad -= config.value_cost * error * x[t, b]
    return total, policy_grad, value_grad


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_those_derived_by_hand(seed):
    net, batch = LinearNet(seed), random_batch(seed=seed)
    assert batch.final[:-1].any()
    assert batch.terminated[1:].any()
    want_loss, want_policy, want_value = loss_and_gradient_by_hand(net, batch, CONFIG)
    output = loss(net, DISTRIBUTION, batch, CONFIG)
    assert output.loss_sum.item() == pytest.approx(want_loss, rel=1e-4)
    policy_grad, value_grad = gradients(net, batch)
    np.testing.assert_allclose(policy_grad, want_policy, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(value_grad, want_value, rtol=1e-3, atol=1e-4)


def test_trap01_reward_at_t_plus_1_pairs_with_action_t():
    # One step whose action is surprising; a policy that acts uniformly, values all zero.
    net = LinearNet()
    nn.init.zeros_(net.policy)
    nn.init.zeros_(net.value)
    batch = random_batch(num_steps=3, batch_size=1, ends=0.0)
    uniform = torch.full((4, 1), -math.log(NUM_ACTIONS))
    batch = batch._replace(
        reward=torch.tensor([[100.0], [0.0], [1.0], [0.0]]),  # the result of row 1's action
        behaviour={"log_prob": uniform},
        action=torch.tensor([[0], [1], [2], [0]], dtype=torch.int32)[:, None],
    )
    config = VTraceConfig(discount=0.5, entropy_cost=0.0, value_cost=0.0)
    output = loss(net, DISTRIBUTION, batch, config)
    # Advantages: row 0 sees 0.5 * 1, row 1 sees 1, row 2 sees 0; row 0's reward is old.
    assert output.metrics["advantage"].item() == pytest.approx(1.5)
    (grad,) = torch.autograd.grad(output.loss_sum, net.policy)
    x = batch.observation[""][:, 0]
    third = 1 / 3
    want = -0.5 * torch.outer(torch.tensor([1.0, 0, 0]) - third, x[0])
    want -= 1.0 * torch.outer(torch.tensor([0, 1.0, 0]) - third, x[1])
    torch.testing.assert_close(grad, want)


def test_trap02_row_t_is_only_a_bootstrap():
    net, batch = LinearNet(), random_batch(ends=0.0)
    want = gradients(net, batch)
    other_action = replace(batch.action, -1, (batch.action[-1] + 1) % NUM_ACTIONS)
    log_prob = replace(batch.behaviour["log_prob"], -1, -9.0)
    changed = batch._replace(action=other_action, behaviour={"log_prob": log_prob})
    for got, expected in zip(gradients(net, changed), want, strict=True):
        assert torch.equal(got, expected)
    # Its observation counts through its value alone, its reward through the last transition.
    for field, value in (("reward", 1.4), ("terminated", True)):
        changed = batch._replace(**{field: replace(getattr(batch, field), -1, value)})
        assert not torch.equal(gradients(net, changed)[0], want[0])


def test_trap02_two_overlapping_unrolls_hold_every_transition_once():
    net, whole = LinearNet(), random_batch(num_steps=8, seed=1)
    config = VTraceConfig(discount=0.9, lambda_=0.0, entropy_cost=0.01)  # one-step targets

    def rows(first, last):
        cut = slice(first, last + 1)
        return whole._replace(
            observation={"": whole.observation[""][cut]},
            behaviour={"log_prob": whole.behaviour["log_prob"][cut]},
            **{n: getattr(whole, n)[cut] for n in ("reward", "terminated", "start", "final")},
            action=whole.action[cut],
            previous_action=whole.previous_action[cut],
        )

    # The advantage looks two rows ahead through vs[t+1]; values need only one.
    halves = [gradients(net, rows(0, 4), config)[1], gradients(net, rows(4, 8), config)[1]]
    torch.testing.assert_close(sum(halves), gradients(net, whole, config)[1])
    counts = [loss(net, DISTRIBUTION, b, config).count for b in (rows(0, 4), rows(4, 8), whole)]
    assert counts[0] + counts[1] == counts[2]


def test_trap06_and_07_the_network_sees_starts_rewards_and_actions_unshifted_and_unmasked():
    net, batch = LinearNet(), random_batch()
    loss(net, DISTRIBUTION, batch, CONFIG)
    assert torch.equal(net.inputs.reward, batch.reward)
    assert torch.equal(net.inputs.previous_action, batch.previous_action)
    assert torch.equal(net.inputs.start, batch.start)
    assert net.core_state is batch.core_state


def test_trap09_truncation_bootstraps_from_the_final_observation():
    # Row 1 is final: transition 0 is the only real one before it, row 2 starts anew.
    net = LinearNet()
    batch = random_batch(num_steps=2, batch_size=1, ends=0.0)
    batch = batch._replace(
        final=torch.tensor([[False], [True], [False]]),
        start=torch.tensor([[False], [False], [True]]),
        reward=torch.tensor([[0.0], [1.0], [0.0]]),
    )
    output = loss(net, DISTRIBUTION, batch, VTraceConfig(discount=0.9, entropy_cost=0.0))
    assert output.count == 1
    value = (batch.observation[""] @ net.value)[:, 0].tolist()
    log_pi = (batch.observation[""][0, 0] @ net.policy.T).log_softmax(-1)[batch.action[0, 0, 0]]
    rho = min(1.0, math.exp(log_pi.item() - batch.behaviour["log_prob"][0, 0].item()))
    want = rho * (1.0 + 0.9 * value[1] - value[0])
    assert output.metrics["advantage"].item() == pytest.approx(want, rel=1e-5)


def test_trap09_final_rows_leave_no_trace():
    net, batch = LinearNet(), random_batch(seed=2)
    index = batch.final.nonzero()
    index = index[index[:, 0] < len(batch.final) - 1]
    assert len(index)
    t, b = index.T
    config = VTraceConfig(discount=0.9, kl_cost=0.1)
    want = loss(net, DISTRIBUTION, batch, config)
    changed = batch._replace(
        action=replace(batch.action, (t, b), 1),
        behaviour={"log_prob": replace(batch.behaviour["log_prob"], (t, b), -50.0)},
        reward=replace(batch.reward, (t + 1, b), 1.3),
        terminated=replace(batch.terminated, (t + 1, b), True),
    )
    got = loss(net, DISTRIBUTION, changed, config)
    assert torch.equal(got.loss_sum, want.loss_sum)
    assert got.metrics == want.metrics
    for a, b in zip(gradients(net, changed, config), gradients(net, batch, config), strict=True):
        assert torch.equal(a, b)


def test_trap16_sums_of_shares_equal_the_sum_of_the_whole():
    net, batch = LinearNet(), random_batch(batch_size=5)

    def share(cut):
        return UnrollBatch(
            *(
                {path: leaf[:, cut] for path, leaf in field.items()}
                if isinstance(field, dict)
                else field[cut]
                if name == "core_state"
                else field[:, cut]
                for name, field in batch._asdict().items()
            )
        )

    config = VTraceConfig(kl_cost=0.1)
    whole = loss(net, DISTRIBUTION, batch, config)
    parts = [loss(net, DISTRIBUTION, share(s), config) for s in (slice(0, 1), slice(1, 5))]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    assert sum(part.count for part in parts) == whole.count == (~batch.final[:-1]).sum()
    for name, total in whole.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name] for p in parts), total)


def test_trap18_behaviour_log_probs_are_those_of_each_row():
    net, batch = LinearNet(), random_batch(ends=0.0)
    log_pi = (batch.observation[""] @ net.policy.T).log_softmax(-1)
    on_policy = log_pi.gather(-1, batch.action.long())[..., 0].detach()
    config = VTraceConfig(discount=0.9)
    same = batch._replace(behaviour={"log_prob": on_policy})
    figures = loss(net, DISTRIBUTION, same, config).metrics
    count = 6 * 5
    assert figures["rho"].item() == pytest.approx(count, rel=1e-5)
    assert figures["kl"].item() == pytest.approx(0, abs=1e-4)
    # New weights chose the actions from row 3 on: those rows alone become off-policy.
    late = replace(on_policy, slice(3, None), on_policy[3:] + math.log(2))
    figures = loss(net, DISTRIBUTION, batch._replace(behaviour={"log_prob": late}), config).metrics
    assert figures["rho"].item() == pytest.approx(3 * 5 + 3 * 5 / 2, rel=1e-5)
    assert figures["kl"].item() == pytest.approx(3 * 5 * math.log(2), rel=1e-5)


def test_policy_gradient_ignores_how_advantages_depend_on_the_network():
    net, batch = LinearNet(), random_batch()
    config = VTraceConfig(value_cost=0.0, entropy_cost=0.0)
    output = loss(net, DISTRIBUTION, batch, config)
    assert not torch.autograd.grad(output.loss_sum, net.value)[0].any()


def test_kl_estimate_is_unbiased_and_so_is_its_gradient():
    # All actions of one state, each weighted by its behaviour probability: an expectation.
    net, distribution = LinearNet(), DISTRIBUTION
    mu_logits = torch.tensor([0.3, -0.2, 0.8])
    x = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    pi_logits = net.policy @ x
    want = distribution.kl(mu_logits, pi_logits)
    (want_grad,) = torch.autograd.grad(want, net.policy)
    got, got_grad = 0.0, torch.zeros_like(want_grad)
    for action, probability in enumerate(mu_logits.softmax(-1)):
        batch = random_batch(num_steps=1, batch_size=1, ends=0.0)
        batch = batch._replace(
            observation={"": x.expand(2, 1, -1)},
            action=torch.full((2, 1, 1), action, dtype=torch.int32),
            behaviour={"log_prob": probability.log().expand(2, 1)},
        )
        with_kl, without = (
            loss(net, distribution, batch, VTraceConfig(kl_cost=kl_cost)).loss_sum
            for kl_cost in (1.0, 0.0)
        )
        term = with_kl - without
        got += probability * term
        got_grad += probability * torch.autograd.grad(term, net.policy)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-6)


def test_kl_has_no_gradient_where_the_policy_is_the_one_that_acted():
    net, batch = LinearNet(), random_batch()
    log_pi = (batch.observation[""] @ net.policy.T).log_softmax(-1)
    on_policy = log_pi.gather(-1, batch.action.long())[..., 0].detach()
    batch = batch._replace(behaviour={"log_prob": on_policy})
    want = gradients(net, batch, VTraceConfig(kl_cost=0.0))[0]
    torch.testing.assert_close(gradients(net, batch, VTraceConfig(kl_cost=10.0))[0], want)


def test_summary_is_means_and_explained_variance():
    net, batch = LinearNet(), random_batch(seed=3)
    output = loss(net, DISTRIBUTION, batch, CONFIG)
    figures = summarize({n: v.item() for n, v in output.metrics.items()}, output.count.item())
    real = ~batch.final[:-1].numpy()
    log_pi = (batch.observation[""] @ net.policy.T).log_softmax(-1)[:-1]
    entropy = -(log_pi.exp() * log_pi).sum(-1).detach().numpy()[real].mean()
    assert figures["entropy"] == pytest.approx(entropy, rel=1e-5)
    chosen = log_pi.gather(-1, batch.action[:-1].long())[..., 0].detach()
    rho = (chosen - batch.behaviour["log_prob"][:-1]).exp().numpy()[real]
    assert figures["rho"] == pytest.approx(rho.mean(), rel=1e-5)
    assert figures["rho_clipped"] == pytest.approx((rho > CONFIG.rho_bar).mean(), rel=1e-5)
    value = (batch.observation[""] @ net.value).detach().numpy()
    targets, errors = [], []
    for b in range(value.shape[1]):
        reward = batch.reward[1:, b].clamp(-1.5, 1.5).numpy()
        discount = 0.9 * (1 - batch.terminated[1:, b].numpy())
        log_rho = (chosen[:, b] - batch.behaviour["log_prob"][:-1, b]).numpy()
        vs, _ = numpy_vtrace(log_rho, real[:, b], discount, reward, value[:, b].copy(), CONFIG)
        targets += vs[:-1][real[:, b]].tolist()
        errors += (vs - value[:, b])[:-1][real[:, b]].tolist()
    assert figures["value_target"] == pytest.approx(np.mean(targets), rel=1e-4)
    assert figures["explained_variance"] == pytest.approx(
        1 - np.var(errors) / np.var(targets), rel=1e-3
    )


def test_summary_of_nothing_is_zero():
    output = loss(LinearNet(), DISTRIBUTION, random_batch(), CONFIG)
    assert set(summarize(dict.fromkeys(output.metrics, 0.0), 0.0).values()) == {0.0}
