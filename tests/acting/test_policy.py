"""Acting and the unrolls that it leaves behind, over environments whose every row is known."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from hpcrl.acting.policy import ActingPolicy
from hpcrl.learning.batches import assemble
from hpcrl.learning.optim import FlatParameters
from hpcrl.ops.masks import transition_masks
from hpcrl.ops.vtrace import vtrace
from hpcrl.types import NetInputs
from tests.acting_tools import CPU, KINDS, RECURRENT, Stage, weights
from tests.env_wrappers.scripted import reward_of
from tests.small import rows_of

STEPS = 60


def acted(kind, steps=STEPS, **arguments):
    stage = Stage(kind, **arguments)
    for _ in range(steps):
        stage.step()
    return stage


def unrolls_of(stage, env_id):
    """Field by field, this environment's unrolls in order."""
    if not stage.unrolls:
        return []
    views = stage.views()
    mine = np.flatnonzero(views["env_id"] == env_id)
    order = mine[np.argsort(views["unroll_index"][mine])]
    return [{name: view[i] for name, view in views.items()} for i in order]


def batch_of(stage):
    """All unrolls as the learner sees them."""
    slots = np.arange(len(stage.unrolls))
    return assemble(stage.views(), slots, stage.spec, stage.brain.behaviour)


def network(stage, seed=3):
    net = stage.brain.make_network(0)
    FlatParameters(net).value.copy_(torch.from_numpy(weights(stage.brain, seed)))
    return net.eval()


def replayed(stage, batch, seed=3):
    """Outputs of the network, unrolled from the stored state over the stored rows."""
    inputs = NetInputs(batch.observation, batch.reward, batch.previous_action, batch.start)
    with torch.no_grad():
        return network(stage, seed)(inputs, batch.core_state)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unroll_steps", [1, 4])
def test_every_row_of_every_environment_is_recorded_once_and_in_order(kind, unroll_steps):
    stage = acted(kind, unroll_steps=unroll_steps)
    for env_id, expected in enumerate(stage.expected):
        unrolls = unrolls_of(stage, env_id)
        assert len(unrolls) == (len(expected.rows) - 1) // unroll_steps > 0
        expected.check(unrolls, unroll_steps)


def test_trap01_reward_and_termination_at_row_t_plus_1_pair_with_the_action_of_row_t():
    stage = acted("scripted")
    batch = batch_of(stage)
    _, real = transition_masks(batch.terminated, batch.final, 1.0)
    assert real.float().mean() > 0.5
    assert batch.terminated[1:].any()
    for t, b in real.nonzero().tolist():
        index, episode, step = batch.observation["obs"][t, b].tolist()
        expected = reward_of(index, episode, step, batch.action[t, b, 0].item())
        assert batch.reward[t + 1, b] == expected


def test_trap02_consecutive_unrolls_share_exactly_one_row():
    stage = acted("truncating", unroll_steps=4)
    for env_id in range(len(stage.envs)):
        unrolls = unrolls_of(stage, env_id)
        assert len(unrolls) > 3
        for now, then in pairwise(unrolls):
            for name in ("obs:obs", "reward", "start", "action", "behaviour:log_prob"):
                np.testing.assert_array_equal(now[name][4], then[name][0])
            # Row 1 of the next is not in this one: it is the row after row T.
            rows = stage.expected[env_id].rows
            first = 4 * int(then["unroll_index"])
            np.testing.assert_array_equal(then["obs:obs"][1], rows[first + 1]["obs"]["obs"])


@pytest.mark.parametrize("shared_torso", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_trap03_stored_core_state_is_the_one_before_row_0(kind, shared_torso):
    """Unrolling from the stored state gives the acting-time values at every row."""
    network = {"hidden_sizes": [8], **RECURRENT, "shared_torso": shared_torso}
    stage = acted(kind, network=network)
    batch = batch_of(stage)
    outputs = replayed(stage, batch)
    assert outputs.value.std() > 0.05
    assert (batch.core_state.abs().amax(1) > 0).any()
    torch.testing.assert_close(outputs.value, batch.behaviour["value"], rtol=0, atol=1e-5)
    log_prob = stage.brain.distribution.log_prob(outputs.policy, batch.action)
    torch.testing.assert_close(log_prob, batch.behaviour["log_prob"], rtol=0, atol=1e-5)


def test_trap03_the_replay_would_notice_a_state_one_step_off():
    stage = acted("scripted")
    batch = batch_of(stage)
    inputs = NetInputs(
        {path: leaf[:1] for path, leaf in batch.observation.items()},
        batch.reward[:1],
        batch.previous_action[:1],
        batch.start[:1],
    )
    with torch.no_grad():
        _, after_row_0 = network(stage)(inputs, batch.core_state)
    late = replayed(stage, batch._replace(core_state=after_row_0))
    assert ((late.value - batch.behaviour["value"]).abs().amax(0) > 1e-3).any()


@pytest.mark.parametrize("kind", ["terminating", "truncating"])
def test_trap06_state_is_reset_before_the_first_observation(kind):
    stage = acted(kind)
    batch = batch_of(stage)
    net = network(stage)
    starts = batch.start.nonzero().tolist()
    assert len(starts) > 10
    for t, b in starts:
        inputs = NetInputs(
            {path: leaf[t : t + 1, b : b + 1] for path, leaf in batch.observation.items()},
            batch.reward[t : t + 1, b : b + 1],
            batch.previous_action[t : t + 1, b : b + 1],
            torch.zeros(1, 1, dtype=torch.bool),
        )
        with torch.no_grad():
            value = net(inputs, net.initial_state(1))[0].value
        torch.testing.assert_close(value[0, 0], batch.behaviour["value"][t, b], rtol=0, atol=1e-5)


def test_trap07_at_a_start_previous_action_and_reward_are_those_of_the_old_episode():
    stage = acted("terminating")
    batch = batch_of(stage)
    seen = 0
    for t, b in batch.start[1:].nonzero().tolist():
        assert torch.equal(batch.previous_action[t + 1, b], batch.action[t, b])
        assert batch.reward[t + 1, b] > 0
        seen += 1
    assert seen > 10


def test_trap08_acting_and_learning_see_the_same_stacks_masked_at_episode_ends(monkeypatch):
    stage = Stage("stacked")
    acted_on: list[list[np.ndarray]] = [[] for _ in stage.envs]
    act, evaluate = stage.brain.act, stage.policy._evaluate
    current: list[int] = []

    def spy_evaluate(ids, *arguments, **flags):
        current[:] = ids.tolist()
        return evaluate(ids, *arguments, **flags)

    def spy_act(net, inputs, *arguments):
        for row, index in enumerate(current):
            acted_on[index].append(inputs.observation["obs"][0, row].numpy().copy())
        return act(net, inputs, *arguments)

    monkeypatch.setattr(stage.policy, "_evaluate", spy_evaluate)
    monkeypatch.setattr(stage.brain, "act", spy_act)
    for _ in range(STEPS):
        stage.step()

    views = stage.views()
    batch = batch_of(stage)
    for env_id, expected in enumerate(stage.expected):
        rows = expected.rows
        # The oracle: the frames since the episode's first row, newest last, zeros before.
        oracle: list[np.ndarray] = []
        episode: list[np.ndarray] = []
        for row in rows:
            episode = [*([] if row["start"] else episode), row["obs"]["obs"]]
            stack = [np.zeros(2, np.uint8)] * 4 + episode
            oracle.append(np.stack(stack[-4:]))
        np.testing.assert_array_equal(np.stack(acted_on[env_id]), np.stack(oracle))
        for column in np.flatnonzero(views["env_id"] == env_id):
            first = 4 * int(views["unroll_index"][column])
            np.testing.assert_array_equal(
                batch.observation["obs"][:, column].numpy(), np.stack(oracle[first : first + 5])
            )


def test_trap09_truncated_episode_bootstraps_from_final_observation():
    discount = 0.9
    stage = acted("truncating", steps=150, unroll_steps=5)
    batch = batch_of(stage)
    discount_t, real = transition_masks(batch.terminated, batch.final, discount)
    value = batch.behaviour["value"]
    log_rho = torch.where(real, 0.0, -torch.inf)  # on policy
    targets = vtrace(log_rho, discount_t, batch.reward[1:], value[:-1], value[-1]).vs
    cut = 0
    for b in range(real.shape[1]):
        for t in range(real.shape[0]):
            if not real[t, b]:
                continue
            # On policy: rewards until the episode's last observation or the unroll's end, then
            # the value of what was seen there.
            expected, factor, row = 0.0, 1.0, t
            while row < real.shape[0] and real[row, b]:
                expected += factor * batch.reward[row + 1, b].item()
                factor *= discount
                row += 1
            expected += factor * value[row, b].item()
            cut += bool(batch.final[row, b])
            assert targets[t, b].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert cut > 50
    assert not batch.terminated.any()
    # The final row shows step L of its episode; the row after it shows step 0 of the next.
    final = batch.final[:-1]
    steps, next_steps = (part["obs"][..., 2] for part in _shifted(batch))
    assert (steps[final] >= 3).all()
    assert (next_steps[final] == 0).all()
    assert (batch.reward[1:][final] == 0).all()


def _shifted(batch):
    yield {path: leaf[:-1] for path, leaf in batch.observation.items()}
    yield {path: leaf[1:] for path, leaf in batch.observation.items()}


@pytest.mark.parametrize("rows_before", range(1, 9))
def test_trap11_partial_unroll_of_a_restarted_environment_is_discarded(rows_before):
    stage = Stage("scripted", num_envs=2, unroll_steps=4)
    for _ in range(rows_before):
        stage.step([0, 1])
    finished = len(unrolls_of(stage, 0))
    assert finished == (len(stage.expected[0].rows) - 1) // 4
    stage.unrolls.clear()
    stage.restart(0)
    for _ in range(12):
        stage.step([0, 1])
    assert stage.policy.restarts == 1
    unrolls = unrolls_of(stage, 0)
    assert len(unrolls) == (len(stage.expected[0].rows) - 1) // 4
    stage.expected[0].check(unrolls, 4)
    assert all(unroll["run_id"] == 1 for unroll in unrolls)
    first = unrolls[0]
    assert first["start"][0]
    assert first["reward"][0] == 0
    assert not first["terminated"][0]
    assert not first["previous_action"][0].any()
    assert not first["core_state"].any()
    # The other environment lost nothing.
    numbers = [int(unroll["unroll_index"]) for unroll in unrolls_of(stage, 1)]
    total = (len(stage.expected[1].rows) - 1) // 4
    assert numbers == list(range(total - len(numbers), total))


@pytest.mark.parametrize("kind", ["terminating", "truncating"])
def test_trap11_a_restart_hides_the_ended_episode_that_came_with_it(kind):
    """A row that is a reset carries no reward and no end, whatever the message says."""
    stage = Stage(kind, num_envs=1, unroll_steps=2)
    while not stage.given[0].ended[0]:
        stage.step([0])
    stage.forget(0)
    stage.unrolls.clear()
    for _ in range(3):
        stage.step([0])
    row = unrolls_of(stage, 0)[0]
    assert row["start"].tolist()[0]
    assert not row["final"][0]
    assert not row["terminated"][0]
    assert row["reward"].tolist() == [0.0, 1.0, 2.0]


def test_trap18_version_and_log_prob_are_per_step():
    stage = Stage("terminating", num_envs=1, unroll_steps=4, network={"hidden_sizes": [8]})
    for version in range(9):
        stage.policy.load(weights(stage.brain, 10 + version), 10 + version)
        stage.step([0])
    first, second = unrolls_of(stage, 0)
    assert first["policy_version"].tolist() == [10, 11, 12, 13, 14]
    assert second["policy_version"].tolist() == [14, 15, 16, 17, 18]
    batch = batch_of(stage)
    by_version = {
        version: stage.brain.distribution.log_prob(
            replayed(stage, batch, version).policy, batch.action
        )
        for version in range(10, 19)
    }
    spread = torch.stack(list(by_version.values())).std(0)
    # The versions do differ, but for the very first row, which is all zeros.
    assert (spread.flatten()[1:] > 1e-3).all()
    for t in range(5):
        for b in range(2):
            version = int(batch.policy_version[t, b])
            expected = by_version[version][t, b]
            torch.testing.assert_close(
                batch.behaviour["log_prob"][t, b], expected, rtol=0, atol=1e-5
            )


def test_trap28_weights_swap_whole_and_are_the_policys_own():
    stage = Stage("terminating", num_envs=2)
    buffer = weights(stage.brain, 7).copy()
    stage.policy.load(buffer, 41)
    assert stage.policy.version == 41
    assert buffer.shape == (stage.policy.num_parameters,)
    buffer[:] = np.nan  # the receive buffer belongs to the next version now
    stage.step([0, 1])
    np.testing.assert_array_equal(stage.policy._flat.value.numpy(), weights(stage.brain, 7))
    loaded = dict(stage.policy._network.named_parameters())
    for name, parameter in network(stage, 7).named_parameters():
        assert torch.equal(loaded[name], parameter), name


def test_rows_of_one_batch_do_not_mix(monkeypatch):
    """Acting on environments together or one by one gives the same values."""
    together, apart = (Stage("scripted", num_envs=3) for _ in range(2))
    told = np.zeros(1, np.int32)

    def sample(policy, generator):
        return torch.from_numpy(np.repeat(told[None], len(policy), 0))

    monkeypatch.setattr(apart.brain.distribution, "sample", sample)
    for step in range(20):
        together.step([0, 1, 2])
        for index in (2, 0, 1) if step % 2 else (1, 2, 0):
            told[:] = together.expected[index].rows[-1]["action"]
            apart.step([index])
    for env_id in range(3):
        ours, theirs = unrolls_of(together, env_id), unrolls_of(apart, env_id)
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(
                one["behaviour:value"], other["behaviour:value"], rtol=0, atol=1e-5
            )


def test_actions_are_reproducible_and_follow_the_seed():
    def actions(seed):
        stage = Stage("scripted", num_envs=2)
        stage.policy._generator.manual_seed(seed)
        taken = []
        for _ in range(30):
            stage.step([0, 1])
            taken += [int(stage.expected[i].rows[-1]["action"][0]) for i in range(2)]
        return taken

    assert actions(4) == actions(4)
    assert actions(4) != actions(5)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_acts_and_records_float32(precision):
    stage = Stage("stacked", num_envs=2)
    stage.policy = ActingPolicy(
        stage.brain, stage.spec, stage.layout, 4, np.arange(2), CPU, precision, seed=1
    )
    stage.policy.load(weights(stage.brain, 3), 0)
    for _ in range(20):
        stage.step([0, 1])
    batch = batch_of(stage)
    assert batch.behaviour["log_prob"].dtype == torch.float32
    assert torch.isfinite(batch.behaviour["log_prob"]).all()
    # Close to what float32 gives, and not equal to it.
    values = replayed(stage, batch).value
    torch.testing.assert_close(batch.behaviour["value"], values, rtol=0.1, atol=0.1)
    assert not torch.equal(batch.behaviour["value"], values)


def test_a_batch_in_which_every_row_is_a_reset_step_gets_no_actions():
    stage = Stage("stacked", num_envs=2)
    rows = rows_of(stage.given[0], [])
    assert stage.policy.act(rows).shape == (0, 1)
    assert stage.policy.record() == []
