import torch

from hpcrl.agents.q_acting import act
from hpcrl.types import NetInputs

N, ACTIONS = 20_000, 4


class Fixed(torch.nn.Module):
    """The same values everywhere; action 2 is the best."""

    def forward(self, inputs, state):
        return torch.tensor([0.0, 1.0, 5.0, 2.0]).expand(1, len(state), -1), state


def acted(**options):
    inputs = NetInputs({}, torch.zeros(1, N), torch.zeros(1, N, 1), torch.zeros(1, N).bool())
    generator = torch.Generator().manual_seed(0)
    return act(Fixed(), None, inputs, torch.zeros(N, 0), generator, **options)


def test_without_epsilon_or_when_greedy_every_action_is_the_best():
    assert (acted().action == 2).all()
    assert (acted(greedy=True, epsilon=torch.ones(N)).action == 2).all()
    assert acted().action.dtype == torch.int32


def test_each_row_explores_with_its_own_epsilon():
    epsilon = torch.where(torch.arange(N) < N // 2, 0.4, 0.0)
    action = acted(epsilon=epsilon).action[:, 0]
    assert (action[N // 2 :] == 2).all()
    other = (action[: N // 2] != 2).float().mean().item()
    # An action at random is the best one in a quarter of the cases; 4 standard deviations.
    assert abs(other - 0.4 * 3 / 4) < 4 * (0.3 * 0.7 / (N // 2)) ** 0.5


def test_recorded_are_the_values_of_the_action_taken_and_of_the_greedy_one():
    out = acted(epsilon=torch.full((N,), 0.9))
    assert (out.behaviour["q_greedy"] == 5.0).all()
    expected = torch.tensor([0.0, 1.0, 5.0, 2.0])[out.action[:, 0].long()]
    assert torch.equal(out.behaviour["q_action"], expected)
