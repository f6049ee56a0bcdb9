import numpy as np
import pytest
import torch

from hpcrl.agents.q_learning import QLearningConfig
from hpcrl.agents.r2d2.agent import AGENT
from hpcrl.agents.r2d2.config import R2D2Config
from hpcrl.agents.r2d2.loss import loss
from hpcrl.types import UnrollBatch

BURN_IN, T, B, ACTIONS = 2, 4, 3, 2
ROWS = BURN_IN + T + 1


class Accumulator(torch.nn.Module):
    """Q = w (running sum of observations, reset at starts), and remembers what it was fed."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))
        self.calls = []

    def forward(self, inputs, state):
        self.calls.append((len(inputs.start), torch.is_grad_enabled(), state.clone()))
        outputs = []
        for x, start in zip(inputs.observation["x"], inputs.start, strict=True):
            state = torch.where(start[:, None], 0.0, state) + x * self.weight[0]
            outputs.append(state * self.weight)
        return torch.stack(outputs), state


def batch_of(seed=0, start=None, terminated=None, final=None, weight=(1.0, 0.5, 0.25)):
    rng = torch.Generator().manual_seed(seed)
    none = torch.zeros(ROWS, B, dtype=torch.bool)
    action = torch.randint(ACTIONS, (ROWS, B, 1), generator=rng)
    return UnrollBatch(
        observation={"x": torch.randn(ROWS, B, 1, generator=rng)},
        reward=torch.randn(ROWS, B, generator=rng),
        terminated=none if terminated is None else terminated,
        start=none if start is None else start,
        final=none if final is None else final,
        previous_action=action,
        action=action,
        behaviour={"weight": torch.tensor(weight).expand(ROWS, -1)},
        policy_version=torch.zeros(ROWS, B, dtype=torch.int64),
        core_state=torch.randn(B, 1, generator=rng),
    )


def config(**options):
    return R2D2Config(
        burn_in_steps=BURN_IN, discount=0.5, num_steps=2, rescale=False, priority_eta=0.9, **options
    )


def literal(batch, online, target, discount=0.5, n=2):
    """The loss of every sequence, row by row in plain Python."""
    losses, priorities = [], []
    for column in range(B):
        q: dict[str, list] = {}
        for name, net in (("online", online), ("target", target)):
            state, q[name] = batch.core_state[column].item(), []
            w = net.weight.detach()
            for t in range(ROWS):
                if batch.start[t, column]:
                    state = 0.0
                state += (batch.observation["x"][t, column] * w[0]).item()
                q[name].append(state * w.numpy())
        errors = []
        for t in range(BURN_IN, ROWS - 1):
            if batch.final[t, column]:
                continue
            goal, factor, at = 0.0, 1.0, t
            while at < min(t + n, ROWS - 1) and not (at > t and batch.final[at, column]):
                at += 1
                goal += factor * batch.reward[at, column].item()
                factor *= 0.0 if batch.terminated[at, column] else discount
            best = int(np.argmax(q["online"][at]))
            goal += factor * q["target"][at][best]
            errors.append(goal - q["online"][t][batch.action[t, column, 0]])
        size = np.abs(errors)
        losses.append(0.5 * np.sum(np.square(errors)))
        priorities.append(0.9 * size.max() + 0.1 * size.mean())
    return np.array(losses), np.array(priorities)


def ends(row, column):
    flags = torch.zeros(ROWS, B, dtype=torch.bool)
    flags[row, column] = True
    return flags


CASES = {
    "no_end": {},
    "terminated": {"terminated": ends(4, 1), "start": ends(4, 1)},
    "truncated": {"final": ends(4, 0), "start": ends(5, 0)},
    "ends_in_burn_in": {"terminated": ends(1, 2), "start": ends(1, 2)},
    "ends_where_the_loss_begins": {"final": ends(BURN_IN, 1), "start": ends(BURN_IN + 1, 1)},
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_priorities_are_those_of_the_equations(case):
    batch = batch_of(**CASES[case])
    online, target = Accumulator([0.7, -0.4]), Accumulator([0.3, 0.9])
    out = loss(online, None, batch, config(), None, target)
    losses, priorities = literal(batch, online, target)
    # The sum over time of each sequence, weighted; its mean is over the sequences.
    assert out.loss_sum.item() == pytest.approx(losses @ [1.0, 0.5, 0.25], rel=1e-5)
    assert out.count == B
    np.testing.assert_allclose(out.priorities, priorities, rtol=1e-5)


def test_both_networks_burn_in_from_the_stored_state_without_gradient():
    batch = batch_of()
    online, target = Accumulator([0.7, -0.4]), Accumulator([0.3, 0.9])
    loss(online, None, batch, config(), None, target)
    for net in (online, target):
        (rows, with_gradient, state), (loss_rows, _, burnt_in) = net.calls
        assert (rows, loss_rows) == (BURN_IN, T + 1)
        assert not with_gradient
        torch.testing.assert_close(state, batch.core_state)
        expected = batch.core_state + batch.observation["x"][:BURN_IN].sum(0) * net.weight[0]
        torch.testing.assert_close(burnt_in, expected.detach())
        assert not burnt_in.requires_grad
    assert online.calls[1][1]
    assert not target.calls[1][1]


def test_the_gradient_is_that_of_the_literal_loss_with_targets_held_fixed():
    batch = batch_of()
    online, target = Accumulator([0.7, -0.4]), Accumulator([0.3, 0.9])
    out = loss(online, None, batch, config(), None, target)
    out.loss_sum.backward()
    assert target.weight.grad is None
    # d/dw of each q by hand: q = w[a] s, and s = s0 + w[0] (sum of x since burn-in).
    td = torch.zeros(T, B)
    with torch.no_grad():
        inputs = batch.observation["x"][..., 0]
        state0 = batch.core_state[:, 0] + inputs[:BURN_IN].sum(0) * 0.7
        sums = inputs[BURN_IN:].cumsum(0)
        state = state0 + 0.7 * sums
        action = batch.action[BURN_IN:-1, :, 0]
        w = torch.tensor([0.7, -0.4])
        q = torch.stack([state * 0.7, state * -0.4], -1)
        t0 = batch.core_state[:, 0] + inputs[:BURN_IN].sum(0) * 0.3
        t_state = t0 + 0.3 * sums
        q_t = torch.stack([t_state * 0.3, t_state * 0.9], -1)
        best = q.argmax(-1, keepdim=True)
        value = q_t.gather(-1, best)[..., 0]
        reward = batch.reward[BURN_IN + 1 :]
        for t in range(T):
            goal = reward[t] + 0.5 * (
                reward[t + 1] + 0.5 * value[t + 2] if t + 1 < T else value[t + 1]
            )
            td[t] = goal - q[t].gather(-1, action[t][:, None])[:, 0]
        weight = torch.tensor([1.0, 0.5, 0.25])
        chosen_w = w[action]
        grad0 = -(weight * td * (chosen_w * sums[:-1] + state[:-1] * (action == 0))).sum()
        grad1 = -(weight * td * state[:-1] * (action == 1)).sum()
    torch.testing.assert_close(online.weight.grad, torch.stack([grad0, grad1]))


def test_a_burn_in_as_long_as_the_unroll_is_refused():
    with pytest.raises(ValueError, match="burn_in_steps 5 must be less than"):
        AGENT.window(R2D2Config(burn_in_steps=5), 5)


def test_published_defaults():
    defaults = R2D2Config()
    assert isinstance(defaults, QLearningConfig)
    assert (defaults.discount, defaults.num_steps, defaults.burn_in_steps) == (0.997, 5, 40)
    assert (defaults.priority_eta, defaults.target_update_steps) == (0.9, 2500)
    assert (defaults.rescale_epsilon, defaults.evaluation_epsilon) == (1e-3, 1e-3)
