import numpy as np
import pytest
import torch

from hpcrl.ops.returns import gae, lambda_returns, n_step_returns

GAMMA = 0.9


def random_arguments(seed, num_steps=9, batch_size=6):
    rng = np.random.default_rng(seed)
    shape = (num_steps, batch_size)
    arguments = {
        "reward_t": rng.normal(size=shape),
        "discount_t": np.where(rng.random(shape) < 0.2, 0, GAMMA),
        "value_tm1": rng.normal(size=shape),
        "bootstrap_value": rng.normal(size=batch_size),
    }
    real = torch.from_numpy(rng.random(shape) > 0.25)
    return {n: torch.from_numpy(a.astype(np.float32)) for n, a in arguments.items()}, real


def naive_n_step(arguments, real, num_steps, t, b):
    """Walk forward from (t, b), gathering at most `num_steps` rewards."""
    a = {name: tensor.double().numpy() for name, tensor in arguments.items()}
    total, discount = 0.0, 1.0
    for k in range(t, min(t + num_steps, len(a["reward_t"]))):
        if not real[k, b]:
            return total + discount * a["value_tm1"][k, b]
        total += discount * a["reward_t"][k, b]
        discount *= a["discount_t"][k, b]
    end = t + num_steps
    last = a["value_tm1"][end, b] if end < len(a["reward_t"]) else a["bootstrap_value"][b]
    return total + discount * last


def test_two_step_returns_by_hand_and_the_last_is_one_step():
    got = n_step_returns(
        torch.tensor([[1.0], [2.0], [4.0]]),
        torch.full((3, 1), GAMMA),
        torch.tensor([[10.0], [20.0], [30.0]]),
        torch.tensor([100.0]),
        num_steps=2,
    )
    want = [1 + 0.9 * 2 + 0.9**2 * 30, 2 + 0.9 * 4 + 0.9**2 * 100, 4 + 0.9 * 100]
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 3, 9, 50])
@pytest.mark.parametrize("seed", range(3))
def test_n_step_returns_equal_a_walk_along_each_row(num_steps, seed):
    arguments, real = random_arguments(seed)
    got = n_step_returns(**arguments, num_steps=num_steps, real=real)
    for t, b in np.ndindex(*got.shape):
        want = naive_n_step(arguments, real, num_steps, t, b)
        np.testing.assert_allclose(got[t, b], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_returns_are_the_mixture_of_n_step_returns(seed):
    # G = (1 - lambda) sum_n lambda^(n-1) G^(n), the last taking all remaining weight. A
    # window that cannot grow any more repeats itself, so the mixture stays exact.
    arguments, real = random_arguments(seed)
    num_steps, lambda_ = len(real), 0.7
    steps = [n_step_returns(**arguments, num_steps=n, real=real) for n in range(1, num_steps + 1)]
    want = sum((1 - lambda_) * lambda_**n * g for n, g in enumerate(steps[:-1]))
    want += lambda_ ** (num_steps - 1) * steps[-1]
    got = lambda_returns(**arguments, lambda_=lambda_, real=real)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_lambda_one_is_the_discounted_return():
    arguments, real = random_arguments(0)
    got = lambda_returns(**arguments, lambda_=1.0, real=real)
    want = n_step_returns(**arguments, num_steps=100, real=real)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gae_is_the_discounted_sum_of_temporal_differences():
    arguments, _ = random_arguments(1)
    a = {name: tensor.double().numpy() for name, tensor in arguments.items()}
    values = np.concatenate([a["value_tm1"], a["bootstrap_value"][None]])
    delta = a["reward_t"] + a["discount_t"] * values[1:] - values[:-1]
    want = np.zeros_like(delta)
    for s in range(len(delta)):
        for t in range(s, len(delta)):
            want[s] += np.prod(0.95 * a["discount_t"][s:t], axis=0) * delta[t]
    np.testing.assert_allclose(gae(**arguments, lambda_=0.95), want, rtol=1e-5, atol=1e-5)


def test_trap09_a_truncated_episode_bootstraps_from_its_final_observation():
    # Rows 0 and 1 are an episode truncated after row 1's action; row 2 is final.
    value = torch.tensor([[1.0], [2.0], [50.0], [7.0]])
    reward = torch.tensor([[1.0], [1.0], [999.0], [1.0]])
    real = torch.tensor([[True], [True], [False], [True]])
    discount = torch.full((4, 1), GAMMA)
    bootstrap = torch.tensor([3.0])
    returns = lambda_returns(reward, discount, value, bootstrap, 1.0, real)[:, 0]
    want = [1 + 0.9 * 1 + 0.9**2 * 50, 1 + 0.9 * 50, 50, 1 + 0.9 * 3]
    np.testing.assert_allclose(returns, want, rtol=1e-6)
    assert gae(reward, discount, value, bootstrap, 1.0, real)[2, 0] == 0


def test_arguments_are_checked():
    arguments, real = random_arguments(0)
    with pytest.raises(ValueError, match="num_steps"):
        n_step_returns(**arguments, num_steps=0)
    with pytest.raises(ValueError, match="real"):
        gae(**arguments, lambda_=1.0, real=real[:-1])
    with pytest.raises(TypeError, match="real"):
        gae(**arguments, lambda_=1.0, real=real.float())
