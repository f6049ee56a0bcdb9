"""Parts of a batch on their way to a device; on a CPU they are views."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from hpcrl.bench.costs import random_batch
from hpcrl.learning.batches import parts
from hpcrl.node.staging import Staging
from tests.small import brain_of, config_of, env_spec

CPU = torch.device("cpu")


@pytest.mark.parametrize("edges", [[0, 6], [0, 2, 6], [0, 1, 3, 6]])
def test_parts_are_the_unrolls_between_the_edges_in_order(edges):
    batch = random_batch(config_of(), env_spec(), brain_of(env_spec()), 6)
    batch.reward[:] = torch.arange(6.0)
    batch.policy_version[:] = torch.arange(6)
    pieces = list(parts(batch, np.array(edges), Staging(CPU)))
    spans = list(pairwise(edges))
    assert [piece.reward[0].tolist() for piece in pieces] == [list(range(*s)) for s in spans]
    for (first, last), piece in zip(spans, pieces, strict=True):
        assert torch.equal(piece.policy_version, batch.policy_version[:, first:last])
        assert torch.equal(piece.observation["obs"], batch.observation["obs"][:, first:last])
        assert torch.equal(piece.core_state, batch.core_state[first:last])
        assert piece.behaviour.keys() == batch.behaviour.keys()


class LoudStaging(Staging):
    """Says what happens when."""

    def __init__(self):
        super().__init__(CPU)
        self.events = []

    def put(self, name, host):
        if name == "reward":
            self.events.append("put")
        return super().put(name, host)

    def join(self):
        self.events.append("join")


def test_the_next_part_is_on_its_way_while_one_is_used_and_none_is_used_before_it_came():
    batch = random_batch(config_of(), env_spec(), brain_of(env_spec()), 3)
    staging = LoudStaging()
    for _ in parts(batch, np.arange(4), staging):
        staging.events.append("use")
    assert staging.events == [
        *("put", "join"),
        *("put", "use", "join"),
        *("put", "use", "join"),
        "use",
    ]


def test_on_a_cpu_nothing_is_copied():
    tensor = torch.zeros(3)
    assert Staging(CPU).put("a", tensor) is tensor
