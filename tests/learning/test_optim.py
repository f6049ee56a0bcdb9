import pytest
import torch
from torch import nn

from hpcrl.config.sections import OptimizerConfig
from hpcrl.learning.optim import FlatParameters, Optimizer, clip_by_global_norm


def make_module(seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 3), nn.Linear(3, 1))
    weight = module.get_parameter("0.weight")
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return module


def loss_of(module, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 3, 4, 4, generator=generator)
    return (module(x) - x.mean((1, 2, 3))[:, None]).square().mean() * (1 + step % 7)


def assert_equal_parameters(module, other, **tolerance):
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


# Flat parameters.


def test_parameters_and_gradients_are_views_of_the_flat_buffers():
    module, plain = make_module(), make_module()
    flat = FlatParameters(module)
    assert_equal_parameters(module, plain, rtol=0, atol=0)
    loss_of(module, 0).backward()
    loss_of(plain, 0).backward()
    for (name, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert parameter.stride() == other.stride(), name
        assert torch.equal(flat.named(flat.grad)[name], other.grad), name
        assert flat.named(flat.value)[name].data_ptr() == parameter.data_ptr(), name
        assert parameter.data_ptr() % 64 == flat.value.data_ptr() % 64, name
    flat.value.fill_(0.5)
    assert all((parameter == 0.5).all() for parameter in module.parameters())


def test_gradients_accumulate_and_survive_zero_grad():
    module = make_module()
    flat = FlatParameters(module)
    loss_of(module, 0).backward()
    once = flat.grad.clone()
    loss_of(module, 0).backward()
    torch.testing.assert_close(flat.grad, 2 * once)
    for zero_grad in (flat.zero_grad, lambda: module.zero_grad(set_to_none=False)):
        zero_grad()
        assert not flat.grad.any()
        loss_of(module, 0).backward()
        torch.testing.assert_close(flat.grad, once)


def test_modules_built_alike_share_the_layout():
    source, target = FlatParameters(make_module(0)), make_module(1)
    FlatParameters(target).value.copy_(source.value)
    assert_equal_parameters(target, make_module(0), rtol=0, atol=0)


def test_gaps_between_parameters_are_zero():
    flat = FlatParameters(make_module())
    covered = torch.zeros_like(flat.value)
    for view in flat.named(covered).values():
        view += 1
    assert covered.max() == 1
    assert not flat.value[covered == 0].any()
    assert covered.sum() == sum(p.numel() for p in make_module().parameters())


def test_parameters_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match=r"weight.*bfloat16"):
        FlatParameters(nn.Linear(2, 2, dtype=torch.bfloat16))
    module = nn.Linear(2, 2, bias=False)
    module.weight.data = torch.zeros(2, 4)[:, ::2]
    with pytest.raises(ValueError, match=r"weight.*dense"):
        FlatParameters(module)


# Clipping.


@pytest.mark.parametrize(("max_norm", "want"), [(10.0, [3, 4]), (2.5, [1.5, 2]), (0.0, [3, 4])])
def test_clipping_scales_to_the_largest_norm(max_norm, want):
    grad = torch.tensor([3.0, 4.0])
    assert clip_by_global_norm(grad, max_norm) == 5.0
    torch.testing.assert_close(grad, torch.tensor(want, dtype=torch.float32))


def test_clipping_leaves_a_zero_gradient():
    grad = torch.zeros(2)
    assert clip_by_global_norm(grad, 1.0) == 0.0
    assert grad.tolist() == [0, 0]


# The optimizers against torch.optim.

ADAM = OptimizerConfig(name="adam", learning_rate=0.02, beta1=0.8, beta2=0.98, epsilon=1e-3)
RMSPROP = OptimizerConfig(name="rmsprop", learning_rate=0.01, alpha=0.95, epsilon=0.01)
MOMENTUM = OptimizerConfig(
    name="rmsprop", learning_rate=0.003, alpha=0.95, epsilon=0.01, momentum=0.7
)


def torch_optimizer(module, config):
    if config.name == "adam":
        betas = (config.beta1, config.beta2)
        return torch.optim.Adam(module.parameters(), config.learning_rate, betas, config.epsilon)
    return torch.optim.RMSprop(
        module.parameters(), config.learning_rate, config.alpha, config.epsilon,
        momentum=config.momentum,
    )  # fmt: skip


def run(module, flat, optimizer, steps):
    for step in steps:
        flat.zero_grad()
        loss_of(module, step).backward()
        optimizer.step(agent_steps=10 * step)


@pytest.mark.parametrize("config", [ADAM, RMSPROP, MOMENTUM])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_fifty_steps_equal_torch(config, max_grad_norm, schedule):
    values = {n: getattr(config, n) for n in config.__dataclass_fields__}
    config = OptimizerConfig(**values | {"max_grad_norm": max_grad_norm, "schedule": schedule})
    module, oracle = make_module(), make_module()
    flat = FlatParameters(module)
    run(module, flat, Optimizer(flat, config, total_agent_steps=400), range(50))
    reference = torch_optimizer(oracle, config)
    clipped = 0
    for step in range(50):
        reference.zero_grad()
        loss_of(oracle, step).backward()
        if max_grad_norm:
            norm = nn.utils.clip_grad_norm_(oracle.parameters(), max_grad_norm)
            clipped += norm.item() > max_grad_norm
        if schedule == "linear":
            rate = config.learning_rate * max(0, 1 - 10 * step / 400)
            reference.param_groups[0]["lr"] = rate
        reference.step()
    assert 0 < clipped < 50 or not max_grad_norm
    assert_equal_parameters(module, oracle, rtol=1e-4, atol=1e-5)


def test_step_returns_the_norm_before_clipping():
    flat = FlatParameters(make_module())
    flat.grad.zero_()
    flat.grad[:2] = torch.tensor([30.0, 40.0])
    assert Optimizer(flat, OptimizerConfig(max_grad_norm=1.0), 0).step(0) == 50.0


def test_linear_schedule_reaches_zero_and_stays_there():
    config = OptimizerConfig(learning_rate=0.4, schedule="linear")
    optimizer = Optimizer(FlatParameters(make_module()), config, total_agent_steps=100)
    rates = [optimizer.learning_rate(steps) for steps in (0, 25, 100, 120)]
    assert rates == pytest.approx([0.4, 0.3, 0.0, 0.0])


def test_linear_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"stop\.agent_steps"):
        Optimizer(FlatParameters(make_module()), OptimizerConfig(schedule="linear"), 0)


@pytest.mark.parametrize("config", [ADAM, RMSPROP, MOMENTUM])
def test_a_resumed_optimizer_goes_on_as_if_never_stopped(config):
    module, resumed = make_module(), make_module(1)
    flat, resumed_flat = FlatParameters(module), FlatParameters(resumed)
    optimizer = Optimizer(flat, config, 0)
    run(module, flat, optimizer, range(5))
    state, parameters = optimizer.state_dict(), flat.value.clone()
    run(module, flat, optimizer, range(5, 10))

    resumed_flat.value.copy_(parameters)
    continued = Optimizer(resumed_flat, config, 0)
    continued.load_state_dict(state)
    run(resumed, resumed_flat, continued, range(5, 10))
    assert torch.equal(resumed_flat.value, flat.value)


def test_state_is_a_contiguous_copy_of_tensors():
    module = make_module()
    flat = FlatParameters(module)
    optimizer = Optimizer(flat, ADAM, 0)
    run(module, flat, optimizer, range(1))
    state = optimizer.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    run(module, flat, optimizer, range(1, 2))
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert state["first_moment.0.weight"].shape == (4, 3, 3, 3)


def test_the_state_of_another_optimizer_or_network_is_refused():
    optimizer = Optimizer(FlatParameters(make_module()), ADAM, 0)
    other = Optimizer(FlatParameters(nn.Linear(2, 2)), ADAM, 0)
    with pytest.raises(ValueError, match="entries differ"):
        optimizer.load_state_dict(other.state_dict())
    rmsprop = Optimizer(FlatParameters(make_module()), RMSPROP, 0)
    with pytest.raises(ValueError, match=r"first_moment\.0\.bias"):
        optimizer.load_state_dict(rmsprop.state_dict())
