"""Batches padded to buckets give each row what it would get alone."""

import numpy as np
import torch

from hpcrl.acting.forward import BucketedForward, Forward, make_forward
from tests.small import brain_of, env_spec

CPU = torch.device("cpu")
LSTM = {"network": {"core": "lstm", "core_size": 4}}


def batch(rows, seed):
    rng = np.random.default_rng(seed)
    observation = {"obs": rng.standard_normal((rows, 3)).astype(np.float32)}
    fields = {
        "reward": rng.standard_normal(rows).astype(np.float32),
        "previous_action": rng.integers(0, 4, (rows, 1)).astype(np.int32),
        "start": rng.random(rows) < 0.3,
    }
    return observation, fields, torch.from_numpy(rng.standard_normal((rows, 8)).astype("float32"))


def overwriting(compute):
    """As a CUDA graph does: results always come in the same tensors."""
    out = compute()

    @torch.inference_mode()
    def again():
        new = compute()
        for old, value in zip(leaves(out), leaves(new), strict=True):
            old.copy_(value)
        return out

    return again


def leaves(out):
    return [out.action, *out.behaviour.values(), out.core_state]


def both(**sections):
    brain = brain_of(env_spec(), **sections)
    network = brain.make_network(1).eval()
    captured = []

    def capture(compute, generator):
        captured.append(compute)
        return overwriting(compute)

    arguments = (brain, network, CPU, "float32", torch.Generator().manual_seed(0), True)
    return Forward(*arguments), BucketedForward(*arguments, capture=capture), captured


def test_rows_of_a_padded_batch_get_what_they_get_alone():
    plain, bucketed, captured = both(**LSTM)
    # Sizes grow and shrink within a bucket, so that older rows are left behind the new ones.
    for seed, rows in enumerate((5, 8, 3, 9, 16, 1)):
        observation, fields, state = batch(rows, seed)
        one = plain.act(observation, fields, state, None)
        other = bucketed.act(observation, fields, state, None)
        torch.testing.assert_close(other.action, one.action)
        torch.testing.assert_close(other.core_state, one.core_state)
        assert other.behaviour.keys() == one.behaviour.keys()
        for name, value in one.behaviour.items():
            torch.testing.assert_close(other.behaviour[name], value)
    assert len(captured) == 2  # of 8 and of 16 rows


def test_what_a_batch_gave_stays_when_the_next_one_comes():
    _, bucketed, _ = both(**LSTM)
    first = bucketed.act(*batch(4, 0), None)
    kept = [leaf.clone() for leaf in leaves(first)]
    bucketed.act(*batch(4, 1), None)
    for leaf, copy in zip(leaves(first), kept, strict=True):
        assert torch.equal(leaf, copy)


def test_weights_that_are_overwritten_are_seen_by_what_was_captured():
    plain, bucketed, _ = both(**LSTM)
    rows = batch(4, 0)
    before = bucketed.act(*rows, None).behaviour["value"]
    with torch.no_grad():
        for parameter in bucketed._network.parameters():
            parameter.add_(0.1)
    after = bucketed.act(*rows, None).behaviour["value"]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, plain.act(*rows, None).behaviour["value"])


def test_rates_of_exploration_reach_their_rows():
    sections = {
        "layout": "replay",
        "agent": {"name": "r2d2", "burn_in_steps": 1, "num_steps": 1},
        "learner": {"unroll_steps": 6},
        **LSTM,
    }
    brain = brain_of(env_spec(), **sections)
    network = brain.make_network(1).eval()
    generator = torch.Generator().manual_seed(0)
    arguments = (brain, network, CPU, "float32", generator, False)
    bucketed = BucketedForward(*arguments, capture=lambda compute, generator: compute)
    epsilon = torch.tensor([0.0, 1.0] * 64)
    observation, fields, state = batch(128, 0)
    actions = bucketed.act(observation, fields, state, epsilon).action[:, 0]
    greedy = Forward(*arguments).act(observation, fields, state, torch.zeros(128)).action[:, 0]
    assert torch.equal(actions[::2], greedy[::2])
    assert not torch.equal(actions[1::2], greedy[1::2])


def test_a_cpu_computes_batches_as_they_are():
    brain = brain_of(env_spec())
    network = brain.make_network(0)
    made = make_forward(brain, network, CPU, "float32", torch.Generator(), False)
    assert type(made) is Forward
