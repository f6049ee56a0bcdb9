import pytest
import torch

from hpcrl.agents.policy_acting import act, behaviour_spec
from hpcrl.nets.actor_critic import ActorCritic
from hpcrl.ops.distributions import ActionDistribution
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from hpcrl.types import NetInputs

DISCRETE = ActionSpec((ActionPart("discrete", nvec=(4, 2)),))
BOX = ActionSpec((ActionPart("box", low=(-2.0,), high=(2.0,)),))


def make(action_spec, **options):
    torch.manual_seed(0)
    leaves = {"": ObservationLeaf(ArraySpec((3,), "float32"))}
    distribution = ActionDistribution(action_spec)
    env_spec = EnvSpec("test:env", leaves, action_spec)
    return ActorCritic(env_spec, distribution, **options), distribution


def make_inputs(num_rows, num_actions):
    return NetInputs(
        observation={"": torch.randn(1, num_rows, 3)},
        reward=torch.zeros(1, num_rows),
        previous_action=torch.zeros(1, num_rows, num_actions),
        start=torch.zeros(1, num_rows, dtype=torch.bool),
    )


@pytest.mark.parametrize("action_spec", [DISCRETE, BOX])
@pytest.mark.parametrize("greedy", [True, False])
def test_what_is_recorded_is_what_the_learner_recomputes(action_spec, greedy):
    net, distribution = make(action_spec, core="lstm", core_size=8)
    inputs, state = make_inputs(6, action_spec.size), torch.randn(6, 16)
    generator = torch.Generator().manual_seed(0)
    output = act(net, distribution, inputs, state, generator, greedy)
    outputs, next_state = net(inputs, state)
    assert output.action.shape == (6, action_spec.size)
    assert str(output.action.dtype) == f"torch.{action_spec.dtype}"
    log_prob = distribution.log_prob(outputs.policy[0], output.action)
    torch.testing.assert_close(output.behaviour["log_prob"], log_prob)
    torch.testing.assert_close(output.behaviour["value"], outputs.value[0])
    torch.testing.assert_close(output.core_state, next_state)
    if greedy:
        assert torch.equal(output.action, distribution.mode(outputs.policy[0]))


def test_behaviour_has_the_declared_names_shapes_and_dtypes():
    net, distribution = make(DISCRETE)
    output = act(net, distribution, make_inputs(6, 2), net.initial_state(6))
    spec = behaviour_spec()
    assert list(output.behaviour) == list(spec)
    for name, array in output.behaviour.items():
        assert array.shape == (6, *spec[name].shape)
        assert str(array.dtype) == f"torch.{spec[name].dtype}"


def test_actions_repeat_with_the_same_generator():
    net, distribution = make(BOX)
    inputs, state = make_inputs(6, 1), net.initial_state(6)
    first, again, other = (
        act(net, distribution, inputs, state, torch.Generator().manual_seed(seed)).action
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_nothing_that_acting_returns_keeps_a_graph():
    net, distribution = make(BOX, core="lstm", core_size=4)
    output = act(net, distribution, make_inputs(2, 1), net.initial_state(2))
    tensors = [output.action, output.core_state, *output.behaviour.values()]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_more_than_one_step_is_refused():
    net, distribution = make(DISCRETE)
    inputs = NetInputs(
        {"": torch.zeros(2, 3, 3)},
        torch.zeros(2, 3),
        torch.zeros(2, 3, 2),
        torch.zeros(2, 3, dtype=torch.bool),
    )
    with pytest.raises(ValueError, match="start"):
        act(net, distribution, inputs, net.initial_state(3))
