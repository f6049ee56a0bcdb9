import numpy as np
import pytest
import torch

from hpcrl.ops.returns import lambda_returns, n_step_returns
from hpcrl.ops.vtrace import vtrace


def random_arguments(num_steps=7, batch_size=5, seed=0, terminations=0.2):
    rng = np.random.default_rng(seed)
    shape = (num_steps, batch_size)
    return {
        # rho from 0.05 to 20: on both sides of every clip.
        "log_rho": rng.uniform(-3, 3, shape).astype(np.float32),
        "discount_t": np.where(rng.random(shape) < terminations, 0, 0.9).astype(np.float32),
        "reward_t": rng.normal(size=shape).astype(np.float32),
        "value_tm1": rng.normal(size=shape).astype(np.float32),
        "bootstrap_value": rng.normal(size=batch_size).astype(np.float32),
    }


def tensors(arguments):
    return {name: torch.from_numpy(array) for name, array in arguments.items()}


def ground_truth(arguments, rho_bar, c_bar, pg_rho_bar, lambda_):
    """Eq. (1) and section 4.2 of arXiv:1802.01561 as written; a double sum, in float64.

    v_s = V(x_s) + sum_{t=s}^{s+n-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) rho_t
                    (r_t + gamma V(x_{t+1}) - V(x_t))
    """
    a = {name: array.astype(np.float64) for name, array in arguments.items()}
    weight = np.exp(a["log_rho"])
    rho = np.minimum(rho_bar, weight)
    c = lambda_ * np.minimum(c_bar, weight)
    values = np.concatenate([a["value_tm1"], a["bootstrap_value"][None]])
    reward, discount = a["reward_t"], a["discount_t"]
    num_steps = len(reward)
    vs = values.copy()
    for s in range(num_steps):
        for t in range(s, num_steps):
            delta = rho[t] * (reward[t] + discount[t] * values[t + 1] - values[t])
            vs[s] += np.prod(discount[s:t] * c[s:t], axis=0) * delta
    clipped = np.minimum(pg_rho_bar, weight)
    advantage = clipped * (reward + discount * vs[1:] - values[:-1])
    return vs[:-1], advantage


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rho_bar", "c_bar", "pg_rho_bar", "lambda_"),
    [(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 3.0, 0.9), (4.0, 3.7, 0.5, 0.0), (1e9, 1.0, 1e9, 1.0)],
)
def test_equals_the_double_sum_of_the_paper(seed, rho_bar, c_bar, pg_rho_bar, lambda_):
    arguments = random_arguments(seed=seed)
    clips = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": pg_rho_bar, "lambda_": lambda_}
    want_vs, want_advantage = ground_truth(arguments, **clips)
    got = vtrace(**tensors(arguments), **clips)
    np.testing.assert_allclose(got.vs.numpy(), want_vs, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(got.pg_advantage.numpy(), want_advantage, rtol=2e-5, atol=1e-5)


def test_on_policy_targets_are_n_step_returns():
    arguments = random_arguments(num_steps=4, batch_size=1, terminations=0.0)
    arguments["log_rho"][:] = 0
    r, v = arguments["reward_t"][:, 0], arguments["bootstrap_value"][0]
    got = vtrace(**tensors(arguments)).vs[:, 0]
    want = [
        r[0] + 0.9 * r[1] + 0.9**2 * r[2] + 0.9**3 * r[3] + 0.9**4 * v,
        r[1] + 0.9 * r[2] + 0.9**2 * r[3] + 0.9**3 * v,
        r[2] + 0.9 * r[3] + 0.9**2 * v,
        r[3] + 0.9 * v,
    ]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_without_lag_targets_and_advantages_are_those_of_on_policy_returns(seed):
    """Equal policies: eq. (1) is the n-step return to the unroll's end, also over terminations."""
    arguments = tensors(random_arguments(seed=seed))
    log_rho = arguments.pop("log_rho") * 0
    got = vtrace(log_rho, **arguments)
    steps = len(log_rho)
    returns = n_step_returns(**arguments, num_steps=steps)
    np.testing.assert_allclose(got.vs, returns, rtol=2e-5, atol=1e-5)
    advantage = returns - arguments["value_tm1"]
    np.testing.assert_allclose(got.pg_advantage, advantage, rtol=2e-5, atol=2e-5)
    # With lambda the targets are the lambda-returns, and advantages use their successors.
    mixed = vtrace(log_rho, **arguments, lambda_=0.7)
    expected = lambda_returns(**arguments, lambda_=0.7)
    np.testing.assert_allclose(mixed.vs, expected, rtol=2e-5, atol=1e-5)


def test_minus_infinity_leaves_the_value_and_no_advantage():
    arguments = random_arguments(terminations=0.0)
    arguments["log_rho"][3] = -np.inf
    got = vtrace(**tensors(arguments))
    assert np.array_equal(got.vs[3].numpy(), arguments["value_tm1"][3])
    assert not got.pg_advantage[3].any()
    # The row before bootstraps from that value, whatever comes after.
    arguments["reward_t"][3:] = 1e6
    again = vtrace(**tensors(arguments))
    assert torch.equal(got.vs[:3], again.vs[:3])
    assert torch.equal(got.pg_advantage[:3], again.pg_advantage[:3])


def test_nothing_crosses_a_zero_discount():
    arguments = random_arguments(terminations=0.0)
    arguments["discount_t"][2] = 0
    whole = vtrace(**tensors(arguments))
    head = {name: array[:3] for name, array in arguments.items()}
    head["bootstrap_value"] = np.zeros_like(arguments["bootstrap_value"])
    tail = {name: array[3:] for name, array in arguments.items()}
    tail["bootstrap_value"] = arguments["bootstrap_value"]
    assert torch.equal(whole.vs[:3], vtrace(**tensors(head)).vs)
    assert torch.equal(whole.vs[3:], vtrace(**tensors(tail)).vs)


def test_targets_carry_no_gradient():
    arguments = tensors(random_arguments())
    arguments["value_tm1"].requires_grad_()
    got = vtrace(**arguments)
    assert not got.vs.requires_grad
    assert not got.pg_advantage.requires_grad


def test_shapes_and_dtypes_are_checked():
    arguments = tensors(random_arguments())
    with pytest.raises(ValueError, match="reward_t"):
        vtrace(**arguments | {"reward_t": arguments["reward_t"][:-1]})
    with pytest.raises(ValueError, match="bootstrap_value"):
        vtrace(**arguments | {"bootstrap_value": arguments["bootstrap_value"][:1]})
    with pytest.raises(TypeError, match="value_tm1"):
        vtrace(**arguments | {"value_tm1": arguments["value_tm1"].double()})
