import math

import numpy as np
import pytest
import torch

from hpcrl import specs
from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.nets.encoder import ObservationEncoder, OneHot, unpack_bits
from hpcrl.nets.trunk import PreviousAction
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from hpcrl.types import NetInputs

MIXED_ACTION = ActionSpec(
    (
        ActionPart("discrete", nvec=(3, 2)),
        ActionPart("box", low=(-1.0, 0.0), high=(1.0, math.inf)),
    )
)
CATEGORICAL = ActionSpec((ActionPart("discrete", nvec=(4,)),))
FRAMES = {"frame": ObservationLeaf(ArraySpec((84, 84), "uint8"), stack=4)}
VECTOR = {"": ObservationLeaf(ArraySpec((3,), "float32"))}
MIXED = {
    "camera.left": ObservationLeaf(ArraySpec((40, 48, 3), "uint8")),
    "map": ObservationLeaf(ArraySpec((2, 36, 36), "float32")),
    "speed": ObservationLeaf(ArraySpec((), "float32"), stack=2),
    "bytes": ObservationLeaf(ArraySpec((5,), "uint8")),
    "gear": ObservationLeaf(ArraySpec((), "int64"), kind="discrete", nvec=(6,)),
    "cards": ObservationLeaf(ArraySpec((2,), "int64"), kind="discrete", nvec=(3, 2), stack=2),
    "buttons": ObservationLeaf(ArraySpec((7,), "int8"), kind="binary"),
}


def leaf_values(leaf, num_rows, batch_size):
    stack = (leaf.stack,) if leaf.stack > 1 else ()
    shape = (num_rows, batch_size, *stack, *leaf.array.shape)
    if leaf.kind == "discrete":
        nvec = np.array(leaf.nvec).reshape(leaf.array.shape)
        return torch.from_numpy(np.random.default_rng(0).integers(0, nvec, shape))
    if leaf.array.dtype == "uint8":
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    if leaf.kind == "binary":
        return torch.randint(0, 2, shape, dtype=torch.int8)
    return torch.randn(shape)


def make(leaves, action_spec=CATEGORICAL, **options):
    torch.manual_seed(0)
    env_spec = EnvSpec("test:env", leaves, action_spec)
    return ActorCritic(env_spec, ActionDistribution(action_spec), **options)


def make_inputs(leaves, num_rows, batch_size, action_spec=CATEGORICAL, seed=1):
    torch.manual_seed(seed)
    distribution = ActionDistribution(action_spec)
    return NetInputs(
        observation={
            path: leaf_values(leaf, num_rows, batch_size) for path, leaf in leaves.items()
        },
        reward=torch.randn(num_rows, batch_size),
        previous_action=distribution.sample(
            torch.zeros(num_rows, batch_size, distribution.num_params)
        ),
        start=torch.rand(num_rows, batch_size) < 0.3,
    )


def row(inputs, t):
    """One row as T = 1 inputs."""
    cut = slice(t, t + 1)
    return NetInputs(
        {path: leaf[cut] for path, leaf in inputs.observation.items()},
        *(a[cut] for a in inputs[1:]),
    )


# Encoding of observations and actions.


def test_one_hot_codes_stand_side_by_side():
    code = OneHot((3, 2))(torch.tensor([[2, 0], [0, 1]]))
    assert code.tolist() == [[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]]


def test_leaves_that_are_no_images_are_coded_and_concatenated_in_order():
    leaves = {path: MIXED[path] for path in ("speed", "bytes", "gear", "cards", "buttons")}
    encoder = ObservationEncoder(leaves, "mlp", (), "relu")
    observation = {
        "speed": torch.tensor([[[7.0, 8.0]]]),
        "bytes": torch.tensor([[[0, 51, 102, 153, 255]]], dtype=torch.uint8),
        "gear": torch.tensor([[4]]),
        "cards": torch.tensor([[[[2, 0], [1, 1]]]]),
        "buttons": torch.tensor([[[0, 1, 1, 0, 0, 0, 1]]], dtype=torch.int8),
    }
    want = [
        *(7, 8),
        *(0, 0.2, 0.4, 0.6, 1),
        *(0, 0, 0, 0, 1, 0),
        *(0, 0, 1, 1, 0, 0, 1, 0, 0, 1),
        *(0, 1, 1, 0, 0, 0, 1),
    ]
    np.testing.assert_allclose(encoder(observation), [want], rtol=1e-6)
    assert encoder.output_size == len(want)


@pytest.mark.parametrize(
    ("shape", "stack", "order"),
    [
        ((40, 48, 3), 1, (0, 3, 1, 2)),
        ((3, 40, 48), 1, (0, 1, 2, 3)),
        ((40, 48, 3), 2, (0, 1, 4, 2, 3)),
        ((3, 40, 48), 2, (0, 1, 2, 3, 4)),
        ((40, 48), 1, None),
        ((40, 48), 4, (0, 1, 2, 3)),
    ],
)
def test_images_reach_the_torso_channels_first(shape, stack, order):
    leaf = ObservationLeaf(ArraySpec(shape, "uint8"), stack=stack)
    encoder = ObservationEncoder({"image": leaf}, "impala_resnet", (), "relu")
    x = leaf_values(leaf, 2, 3)
    seen = []
    encoder.torsos[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    encoder({"image": x})
    rows = x.flatten(0, 1)
    want = rows[:, None] if order is None else rows.permute(order).reshape(6, -1, 40, 48)
    assert torch.equal(seen[0], want)


@pytest.mark.parametrize("stack", [1, 3])
def test_flags_that_travel_as_bits_reach_torso_and_dense_layers_as_zeros_and_ones(stack):
    shape = (5, 4, 3)
    flags = np.random.default_rng(0).integers(0, 2, (2, 3, *[stack] * (stack > 1), *shape))
    packed = np.packbits(flags.reshape(*flags.shape[:-3], -1), axis=-1)
    leaf = ObservationLeaf(ArraySpec((8,), "uint8"), "binary", stack=stack, bits=shape)
    observation = {"planes": torch.from_numpy(packed)}
    assert torch.equal(unpack_bits(observation["planes"], shape), torch.from_numpy(flags))
    np.testing.assert_array_equal(specs.unpack_bits(packed, shape), flags)
    flat = ObservationEncoder({"planes": leaf}, "mlp", (), "relu")
    np.testing.assert_array_equal(flat(observation), flags.reshape(6, -1))
    encoder = ObservationEncoder({"planes": leaf}, "small_cnn", (), "relu")
    seen = []
    encoder.torsos[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    features = encoder(observation)
    rows = flags.reshape(6, stack, *shape)
    want = rows.transpose(0, 1, 4, 2, 3).reshape(6, stack * 3, 5, 4)
    np.testing.assert_array_equal(seen[0], want)
    conv = encoder.torsos[0].conv
    wanted = torch.relu(torch.nn.functional.conv2d(torch.from_numpy(want).float(), conv.weight))
    torch.testing.assert_close(features, wanted.permute(0, 2, 3, 1).flatten(1))


def test_the_mlp_torso_flattens_images():
    encoder = ObservationEncoder(FRAMES, "mlp", (), "relu")
    frames = leaf_values(FRAMES["frame"], 1, 2)
    torch.testing.assert_close(encoder({"frame": frames}), frames.reshape(2, -1) / 255)


def test_a_convolutional_torso_needs_an_image():
    with pytest.raises(ValueError, match="no leaf of the observation is an image"):
        make(VECTOR, torso="nature_cnn")


def test_previous_actions_are_coded_one_hot_or_scaled():
    code = PreviousAction(
        ActionSpec(
            (
                ActionPart("discrete", nvec=(3,)),
                ActionPart("box", low=(-2.0, 0.0), high=(4.0, math.inf)),
            )
        )
    )
    got = code(torch.tensor([[1.0, 4.0, 9.0], [2.0, -2.0, -1.0]]))
    np.testing.assert_allclose(got, [[0, 1, 0, 1, 9], [0, 0, 1, -1, -1]])
    assert code.output_size == 5


# The whole network.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"core": "lstm", "core_size": 8},
        {"core": "lstm", "core_size": 8, "shared_torso": False},
        {"shared_torso": False, "state_independent_std": True},
        {"torso": "impala_resnet", "use_previous_action": True, "use_previous_reward": True},
        {"torso": "nature_cnn", "core": "lstm", "core_size": 8, "use_previous_action": True},
    ],
)
def test_acting_step_by_step_equals_learning_over_the_unroll(options):
    net = make(MIXED, MIXED_ACTION, hidden_sizes=(16,), **options)
    inputs = make_inputs(MIXED, 5, 3, MIXED_ACTION)
    before = state = torch.randn(3, net.state_size)
    policies, values = [], []
    for t in range(5):
        outputs, state = net(row(inputs, t), state)
        policies.append(outputs.policy)
        values.append(outputs.value)
    outputs, last = net(inputs, before)
    assert outputs.policy.shape == (
        5,
        3,
        net.policy.linear.out_features
        + (0 if net.policy.log_std is None else len(net.policy.log_std)),
    )
    assert outputs.value.shape == (5, 3)
    torch.testing.assert_close(torch.cat(policies), outputs.policy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(values), outputs.value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_every_parameter_gets_a_gradient():
    options = {"core": "lstm", "use_previous_action": True, "use_previous_reward": True}
    net = make(
        MIXED, MIXED_ACTION, torso="nature_cnn", state_independent_std=True,
        shared_torso=False, **options,
    )  # fmt: skip
    outputs, _ = net(make_inputs(MIXED, 3, 2, MIXED_ACTION), net.initial_state(2))
    (outputs.policy.square().sum() + outputs.value.sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        if name != "policy.log_std":  # the derivative of 0 squared
            assert parameter.grad.any(), name


def test_first_policy_is_near_uniform_and_first_value_near_zero_mean():
    net = make(FRAMES, torso="nature_cnn", hidden_sizes=(512,))
    outputs, _ = net(make_inputs(FRAMES, 1, 16), net.initial_state(16))
    assert outputs.policy.abs().max() < 0.05
    weight = net.policy.linear.weight
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(4), rtol=1e-3, atol=1e-8)
    assert net.value.weight.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_convolution_weights_are_channels_last():
    net = make(FRAMES, torso="nature_cnn")
    weight = net.trunks[0].encoder.torsos[0].conv2.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("torso", ["nature_cnn", "impala_resnet"])
def test_outputs_are_float32_and_close_under_autocast(torso):
    options = {"core": "lstm", "core_size": 16, "use_previous_action": True}
    net = make(FRAMES, torso=torso, hidden_sizes=(32,), **options)
    inputs, state = make_inputs(FRAMES, 3, 2), net.initial_state(2)
    exact, _ = net(inputs, state)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = net(inputs, state)
    assert outputs.policy.dtype == outputs.value.dtype == last.dtype == torch.float32
    torch.testing.assert_close(outputs.policy, exact.policy, rtol=0.05, atol=1e-3)
    torch.testing.assert_close(outputs.value, exact.value, rtol=0.05, atol=2e-2)
    outputs.value.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters() if p.grad is not None)


def test_trap07_the_first_row_sees_the_reward_and_action_of_the_episode_before():
    net = make(VECTOR, use_previous_action=True, use_previous_reward=True)
    inputs = make_inputs(VECTOR, 1, 1)._replace(start=torch.tensor([[True]]))
    value = net(inputs, net.initial_state(1))[0].value
    reward = net(inputs._replace(reward=inputs.reward + 0.1), net.initial_state(1))[0].value
    action = inputs.previous_action
    other = net(inputs._replace(previous_action=(action + 1) % 4), net.initial_state(1))[0].value
    assert value != reward
    assert value != other


@pytest.mark.parametrize(("clip", "same"), [(1.0, True), (0.0, False), (6.0, False)])
def test_previous_reward_is_clipped(clip, same):
    net = make(VECTOR, use_previous_reward=True, previous_reward_clip=clip)
    inputs = make_inputs(VECTOR, 1, 1)
    values = [
        net(inputs._replace(reward=torch.tensor([[reward]])), net.initial_state(1))[0].value
        for reward in (5.0, 50.0)
    ]
    assert torch.equal(*values) == same


def test_separate_torsos_share_nothing():
    net = make(VECTOR, shared_torso=False, core="lstm", core_size=4)
    assert net.state_size == 16
    outputs, _ = net(make_inputs(VECTOR, 2, 2), net.initial_state(2))
    outputs.value.sum().backward()
    assert all(p.grad is None for p in net.trunks[0].parameters())
    assert all(p.grad is not None for p in net.trunks[1].parameters())


def test_state_independent_std_does_not_depend_on_the_observation():
    net = make(VECTOR, MIXED_ACTION, state_independent_std=True)
    distribution = ActionDistribution(MIXED_ACTION)
    with torch.no_grad():
        net.policy.log_std.copy_(torch.tensor([0.5, -0.5]))
    outputs, _ = net(make_inputs(VECTOR, 2, 3, MIXED_ACTION), net.initial_state(3))
    log_std = outputs.policy[..., list(distribution.log_std_params)]
    assert torch.equal(log_std, torch.tensor([0.5, -0.5]).expand(2, 3, 2))
    means = outputs.policy[..., distribution.log_std_params[0] - 1]
    assert means.unique().numel() == 6


def test_initial_state_is_zero():
    net = make(VECTOR, core="lstm", core_size=4)
    assert torch.equal(net.initial_state(3), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="core_state"):
        net(make_inputs(VECTOR, 1, 3), torch.zeros(3, 4))
