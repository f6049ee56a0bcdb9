import pytest
import torch

from hpcrl.nets.q_network import QNetwork, num_actions
from hpcrl.types import NetInputs
from tests.small import env_spec

SPEC = env_spec("synthetic:counting", num_actions=3)


def inputs(steps, batch, generator):
    return NetInputs(
        {"obs": torch.randn(steps, batch, 3, generator=generator)},
        torch.randn(steps, batch, generator=generator),
        torch.randint(3, (steps, batch, 1), generator=generator),
        torch.rand(steps, batch, generator=generator) < 0.3,
    )


def test_the_mean_value_over_actions_is_the_value_stream():
    network = QNetwork(SPEC, head_size=8, hidden_sizes=[8])
    rows = inputs(4, 2, torch.Generator().manual_seed(0))
    q, _ = network(rows, network.initial_state(2))
    features, _ = network.trunk(rows, network.initial_state(2))
    torch.testing.assert_close(q.mean(-1), network.value(features)[..., 0])
    assert q.shape == (4, 2, 3)
    assert q.dtype == torch.float32


def test_one_step_at_a_time_equals_all_steps_at_once():
    network = QNetwork(
        SPEC,
        head_size=8,
        hidden_sizes=[8],
        core="lstm",
        core_size=5,
        use_previous_action=True,
        use_previous_reward=True,
    )
    rows = inputs(6, 3, torch.Generator().manual_seed(1))
    state = torch.randn(3, network.state_size, generator=torch.Generator().manual_seed(2))
    whole, last = network(rows, state)
    for t in range(6):
        frame = {"obs": rows.observation["obs"][t : t + 1]}
        one = NetInputs(frame, *(x[t : t + 1] for x in rows[1:]))
        q, state = network(one, state)
        torch.testing.assert_close(q[0], whole[t])
    torch.testing.assert_close(state, last)


def test_an_action_that_is_not_one_choice_is_refused():
    with pytest.raises(ValueError, match="one discrete choice"):
        QNetwork(env_spec("synthetic:counting", action_size=2))
    assert num_actions(SPEC) == 3
