import pytest
import torch
from torch import nn

from hpcrl.nets.core import LSTMCore, NoCore

SIZE, FEATURES = 5, 3


def make_core():
    torch.manual_seed(0)
    return LSTMCore(FEATURES, SIZE)


def torch_cell(core):
    cell = nn.LSTMCell(FEATURES, SIZE)
    with torch.no_grad():
        cell.weight_ih.copy_(core.input.weight)
        cell.weight_hh.copy_(core.recurrent.weight)
        cell.bias_ih.copy_(core.input.bias)
        cell.bias_hh.zero_()
    return cell


def test_equals_torchs_cell_with_episodes_run_one_by_one():
    core, num_rows, batch_size = make_core(), 9, 4
    cell = torch_cell(core)
    x = torch.randn(num_rows, batch_size, FEATURES)
    start = torch.rand(num_rows, batch_size) < 0.3
    state = torch.randn(batch_size, 2 * SIZE)
    outputs, last = core(x, start, state)
    for b in range(batch_size):
        h, c = state[b : b + 1].chunk(2, -1)
        for t in range(num_rows):
            if start[t, b]:
                h, c = torch.zeros(1, SIZE), torch.zeros(1, SIZE)
            h, c = cell(x[t, b : b + 1], (h, c))
            torch.testing.assert_close(outputs[t, b : b + 1], h)
        torch.testing.assert_close(last[b : b + 1], torch.cat([h, c], -1))


def test_trap06_state_is_reset_before_the_first_observation():
    core = make_core()
    x = torch.randn(2, 1, FEATURES)
    stale = torch.full((1, 2 * SIZE), float("nan"))
    start = torch.tensor([[True], [False]])
    outputs, state = core(x, start, stale)
    fresh_outputs, fresh_state = core(x, torch.zeros_like(start), torch.zeros(1, 2 * SIZE))
    assert torch.equal(outputs, fresh_outputs)
    assert torch.equal(state, fresh_state)
    # The first observation of the episode is remembered, not wiped with the state.
    assert not torch.equal(outputs[1], core(x[1:], start[1:], torch.zeros(1, 2 * SIZE))[0][0])


def test_trap06_one_step_at_a_time_equals_one_unroll():
    core = make_core()
    x = torch.randn(6, 2, FEATURES)
    start = torch.rand(6, 2) < 0.4
    state = before = torch.randn(2, 2 * SIZE)
    steps = []
    for t in range(6):
        output, state = core(x[t : t + 1], start[t : t + 1], state)
        steps.append(output)
    outputs, last = core(x, start, before)
    torch.testing.assert_close(torch.cat(steps), outputs)
    torch.testing.assert_close(state, last)


def test_no_gradient_flows_over_the_start_of_an_episode():
    core = make_core()
    x = torch.randn(4, 1, FEATURES, requires_grad=True)
    start = torch.tensor([[False], [False], [True], [False]])
    outputs, _ = core(x, start, torch.zeros(1, 2 * SIZE))
    (gradient,) = torch.autograd.grad(outputs[3].sum(), x)
    assert not gradient[:2].any()
    assert gradient[2:].any()


def test_state_stays_float32_under_autocast():
    core = make_core()
    x, start = torch.randn(3, 2, FEATURES), torch.zeros(3, 2, dtype=torch.bool)
    state = torch.randn(2, 2 * SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = core(x, start, state)
    assert outputs.dtype == last.dtype == torch.float32
    exact, _ = core(x, start, state)
    torch.testing.assert_close(outputs, exact, rtol=0.05, atol=0.02)


def test_forget_gates_start_open():
    assert make_core().input.bias.tolist() == [0] * SIZE + [1] * SIZE + [0] * 2 * SIZE


def test_without_a_core_features_pass_through():
    core = NoCore(FEATURES)
    x, start = torch.randn(3, 2, FEATURES), torch.ones(3, 2, dtype=torch.bool)
    outputs, state = core(x, start, torch.zeros(2, 0))
    assert outputs is x
    assert state.shape == (2, 0)
    assert (core.output_size, core.state_size) == (FEATURES, 0)


def test_state_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="core_state"):
        make_core()(torch.zeros(1, 2, FEATURES), torch.zeros(1, 2).bool(), torch.zeros(2, SIZE))
