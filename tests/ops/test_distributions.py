import math

import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Categorical, Normal, TransformedDistribution
from torch.distributions import kl_divergence as oracle_kl
from torch.distributions.transforms import TanhTransform

from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ActionPart, ActionSpec

INF = math.inf


def discrete(*nvec):
    return ActionPart("discrete", nvec=nvec)


def box(*bounds):
    return ActionPart("box", low=tuple(b[0] for b in bounds), high=tuple(b[1] for b in bounds))


def distribution(*parts, continuous="tanh_normal"):
    return ActionDistribution(ActionSpec(parts), continuous)


def random_params(dist, *leading, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, dist.num_params, generator=generator)


def one_component(kind, loc, log_std, low, high):
    dist = distribution(box((low, high)), continuous=kind)
    return dist, torch.tensor([loc, log_std])


def grid(low, high, num_points=200_001):
    return torch.linspace(low, high, num_points, dtype=torch.float64)[1:-1, None]


def density(dist, params, actions):
    params = params.expand(len(actions), -1)
    return dist.log_prob(params, actions.float()).double().exp().numpy()


# Discrete parts.


@pytest.mark.parametrize("nvec", [(4,), (3, 3), (2, 5, 3)])
def test_categorical_parts_equal_torch_distributions(nvec):
    dist = distribution(discrete(*nvec))
    p, q = random_params(dist, 7, 2), random_params(dist, 7, 2, seed=1)
    action = dist.sample(p)
    ps = [Categorical(logits=logits) for logits in p.split(nvec, -1)]
    qs = [Categorical(logits=logits) for logits in q.split(nvec, -1)]
    log_prob = sum(c.log_prob(action[..., i]) for i, c in enumerate(ps))
    torch.testing.assert_close(dist.log_prob(p, action), log_prob)
    torch.testing.assert_close(dist.entropy(p), sum(c.entropy() for c in ps))
    torch.testing.assert_close(dist.kl(p, q), sum(map(oracle_kl, ps, qs)))
    mode = torch.stack([c.probs.argmax(-1) for c in ps], -1)
    assert torch.equal(dist.mode(p), mode.int())


def test_categories_are_drawn_with_their_probabilities():
    dist = distribution(discrete(3, 2))
    p0, p1 = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.8])
    params = torch.cat([p0.log() + 5.0, p1.log()]).expand(100_000, -1)
    action = dist.sample(params, torch.Generator().manual_seed(0)).long()
    joint = torch.bincount(action[:, 0] * 2 + action[:, 1], minlength=6) / len(action)
    # Standard error at most 0.0016 for 100 000 draws.
    np.testing.assert_allclose(joint.view(3, 2), p0[:, None] * p1, atol=0.006)


def test_padding_of_unequal_components_is_never_drawn_and_has_no_gradient():
    dist = distribution(discrete(2, 9))
    params = torch.full((20_000, 11), -80.0, requires_grad=True)
    action = dist.sample(params, torch.Generator().manual_seed(0))
    assert action[:, 0].max() == 1
    assert action[:, 1].max() == 8
    total = (dist.entropy(params) + dist.log_prob(params, action)).sum()
    assert torch.isfinite(torch.autograd.grad(total, params)[0]).all()


# Continuous parts with finite bounds.


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 6.0), (0.0, 0.1)])
def test_tanh_normal_equals_the_transformed_normal(low, high):
    dist = distribution(box((low, high), (low, high)))
    params = random_params(dist, 50).clamp(max=2.0)
    loc, log_std = params.chunk(2, -1)
    transforms = [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)]
    oracle = TransformedDistribution(Normal(loc.double(), log_std.double().exp()), transforms)
    action = dist.sample(params, torch.Generator().manual_seed(0))
    got, want = dist.log_prob(params, action), oracle.log_prob(action.double()).sum(-1).float()
    # Next to a bound the float32 action is a coarse grid, seen through atanh.
    inside = ((action - low) / (high - low) - 0.5).abs().amax(-1) < 0.4995
    assert inside.sum() > 35
    torch.testing.assert_close(got[inside], want[inside], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0.1)
    other = random_params(dist, 50, seed=1).clamp(max=2.0)
    loc2, log_std2 = other.chunk(2, -1)
    want_kl = oracle_kl(Normal(loc, log_std.exp()), Normal(loc2, log_std2.exp())).sum(-1)
    torch.testing.assert_close(dist.kl(params, other), want_kl)


@pytest.mark.parametrize(("loc", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.5)])
def test_tanh_normal_density_integrates_to_one_and_gives_the_entropy(loc, log_std):
    dist, params = one_component("tanh_normal", loc, log_std, -3.0, 5.0)
    a = grid(-3.0, 5.0)
    p = density(dist, params, a)
    da = (a[1] - a[0]).item()
    assert p.sum() * da == pytest.approx(1.0, abs=2e-3)
    assert -(p * np.log(p + 1e-300)).sum() * da == pytest.approx(
        dist.entropy(params).item(), abs=1e-2
    )


@pytest.mark.parametrize(("log_std", "tolerance"), [(-1.0, 1e-5), (0.69, 5e-4), (2.0, 0.1)])
def test_tanh_normal_entropy_by_quadrature(log_std, tolerance):
    z = np.linspace(-12, 12, 200_001)
    weight = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    for loc in (0.0, 0.5, 3.0):
        dist, params = one_component("tanh_normal", loc, log_std, -1.0, 1.0)
        u = loc + np.exp(log_std) * z
        log_slope = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
        want = 0.5 * np.log(2 * np.pi * np.e) + log_std + (weight * log_slope).sum()
        assert dist.entropy(params).item() == pytest.approx(want, abs=tolerance)


def test_tanh_normal_is_finite_at_the_bounds_and_its_ratio_is_exact():
    dist = distribution(box((-2.0, 2.0)))
    params = torch.tensor([[0.3, -0.5], [9.0, 0.0], [-9.0, 2.5], [0.0, -20.0]])
    params.requires_grad_()
    for action in (-2.0, 2.0, 1.9999999):
        log_prob = dist.log_prob(params, torch.full((4, 1), action))
        (gradient,) = torch.autograd.grad(log_prob.sum(), params)
        assert torch.isfinite(log_prob).all()
        assert torch.isfinite(gradient).all()
    # At the bound the ratio is that of the two normals at atanh(1 - 1e-6).
    p, q = torch.tensor([0.3, -0.5]), torch.tensor([0.5, 0.1])
    at_bound = torch.tensor([2.0])
    u = torch.atanh(torch.tensor(1 - 1e-6))
    want = Normal(0.3, math.exp(-0.5)).log_prob(u) - Normal(0.5, math.exp(0.1)).log_prob(u)
    got = dist.log_prob(p, at_bound) - dist.log_prob(q, at_bound)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)


def test_log_std_is_clamped_to_2():
    dist = distribution(box((-INF, INF)))
    action = torch.tensor([1.0])
    want = dist.log_prob(torch.tensor([0.0, 2.0]), action)
    assert dist.log_prob(torch.tensor([0.0, 3.4]), action) == want


@pytest.mark.parametrize("kind", ["tanh_normal", "clipped_normal"])
def test_samples_and_modes_lie_within_the_bounds(kind):
    dist = distribution(box((-2.0, 2.0), (0.0, 0.1)), continuous=kind)
    params = 20 * random_params(dist, 10_000)
    for action in (dist.sample(params), dist.mode(params)):
        assert action.dtype == torch.float32
        assert (action >= torch.tensor([-2.0, 0.0])).all()
        assert (action <= torch.tensor([2.0, 0.1])).all()


@pytest.mark.parametrize(("loc", "log_std"), [(0.0, 0.0), (1.2, -0.5), (-0.7, 1.0)])
def test_clipped_normal_is_two_atoms_and_a_density_of_mass_one(loc, log_std):
    low, high = -3.0, 5.0
    dist, params = one_component("clipped_normal", loc, log_std, low, high)
    a = grid(low, high)
    p = density(dist, params, a)
    da = (a[1] - a[0]).item()
    atoms = density(dist, params, torch.tensor([[low], [high]], dtype=torch.float64))
    assert p.sum() * da + atoms.sum() == pytest.approx(1.0, abs=1e-4)
    entropy = -(p * np.log(p)).sum() * da - (atoms * np.log(atoms)).sum()
    assert dist.entropy(params).item() == pytest.approx(entropy, abs=1e-3)
    drawn = dist.sample(params.expand(100_000, -1), torch.Generator().manual_seed(0))
    at_bounds = [(drawn == bound).float().mean().item() for bound in (low, high)]
    np.testing.assert_allclose(at_bounds, atoms, atol=0.006)


# Infinite bounds, and parts side by side.


@pytest.mark.parametrize("kind", ["tanh_normal", "clipped_normal"])
def test_without_bounds_it_is_a_normal(kind):
    dist, params = one_component(kind, 4.0, 0.5, -INF, INF)
    params = params.requires_grad_()
    oracle = Normal(4.0, math.exp(0.5))
    for action in (-30.0, 4.0, 1e3):
        log_prob = dist.log_prob(params, torch.tensor([action]))
        assert log_prob.item() == pytest.approx(
            oracle.log_prob(torch.tensor(action)).item(), rel=1e-5
        )
    assert dist.entropy(params).item() == pytest.approx(oracle.entropy().item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(dist.entropy(params) + log_prob, params)
    assert torch.isfinite(gradient).all()


def test_a_half_infinite_bound_is_kept_by_clipping():
    dist, params = one_component("tanh_normal", 0.0, 0.0, 0.0, INF)
    action = dist.sample(params.expand(1000, -1))
    assert (action >= 0).all()
    assert dist.log_prob(params, torch.tensor([0.0])).item() == pytest.approx(math.log(0.5))


def test_a_joint_distribution_is_the_sum_of_its_parts():
    parts = discrete(3), box((-1.0, 1.0), (-INF, INF), (0.0, 2.0)), discrete(2, 2)
    joint = distribution(*parts)
    assert joint.num_params == 3 + 6 + 4
    assert joint.num_actions == 6
    params, other = random_params(joint, 5), random_params(joint, 5, seed=1)
    action = joint.sample(params, torch.Generator().manual_seed(0))
    assert action.dtype == torch.float32
    assert set(action[:, 0].tolist()) <= {0.0, 1.0, 2.0}
    # A box's bounded components come before its unbounded ones, means before log stds.
    pieces = [
        (discrete(3), [0], [0, 1, 2]),
        (box((-1.0, 1.0)), [1], [3, 5]),
        (box((0.0, 2.0)), [3], [4, 6]),
        (box((-INF, INF)), [2], [7, 8]),
        (discrete(2, 2), [4, 5], [9, 10, 11, 12]),
    ]
    assert joint.log_std_params == (5, 6, 8)
    total = {"log_prob": 0, "entropy": 0, "kl": 0}
    for part, actions, columns in pieces:
        single = distribution(part)
        p, q = params[:, columns], other[:, columns]
        total["log_prob"] += single.log_prob(p, action[:, actions])
        total["entropy"] += single.entropy(p)
        total["kl"] += single.kl(p, q)
        torch.testing.assert_close(joint.mode(params)[:, actions], single.mode(p).float())
    torch.testing.assert_close(joint.log_prob(params, action), total["log_prob"])
    torch.testing.assert_close(joint.entropy(params), total["entropy"])
    torch.testing.assert_close(joint.kl(params, other), total["kl"])


def test_samples_repeat_with_the_same_generator_and_need_no_gradient():
    dist = distribution(discrete(5), box((-1.0, 1.0)))
    params = random_params(dist, 100).requires_grad_()
    draws = [dist.sample(params, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not draws[0].requires_grad


def test_shapes_and_dtypes_are_checked():
    dist = distribution(discrete(5))
    with pytest.raises(ValueError, match="params"):
        dist.entropy(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="action"):
        dist.log_prob(torch.zeros(3, 5), torch.zeros(4, 1))
    with pytest.raises(TypeError, match="float32"):
        dist.sample(torch.zeros(3, 5, dtype=torch.bfloat16))
