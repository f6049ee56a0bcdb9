"""Counts per role: automatic, fractional, impossible; the equation in every error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpcrl.topology import (
    NodeInfo,
    RoleDemand,
    TopologyConfig,
    TopologyError,
    local_world_size,
    plan_topology,
    uniform_node_map,
)
from tests.oracles.topology import check_topology, role_counts

LOCAL = RoleDemand(placement="local")


@pytest.mark.parametrize(
    ("nodes", "config", "demand", "expected"),
    [
        # Laptop: one of each, the rest act.
        (uniform_node_map(1, 3), {}, {}, (1, 1, 1, 0, 0)),
        (uniform_node_map(1, 4), {}, {}, (1, 1, 2, 0, 0)),
        (uniform_node_map(1, 18), {}, {}, (1, 1, 16, 0, 0)),
        (uniform_node_map(1, 19), {}, {}, (1, 2, 16, 0, 0)),
        # One GPU: it is the learner's, inference stays on the CPU.
        (uniform_node_map(1, 8, 1), {}, {}, (1, 1, 6, 0, 0)),
        # 31 ranks a node beside the learner make 2 groups of at most 1 + 16.
        (uniform_node_map(4, 32, 4), {}, {}, (4, 8, 116, 0, 0)),
        # One GPU is left per node, so one inference rank each.
        (uniform_node_map(4, 32, 2), {}, {}, (4, 4, 120, 0, 0)),
        (uniform_node_map(4, 32), {}, {}, (4, 8, 116, 0, 0)),
        # GPU roles go where GPUs are: a learner on the one GPU node, inference beside it.
        (
            (*uniform_node_map(1, 4, 4), NodeInfo("cpu", tuple(range(4, 40)))),
            {},
            {},
            (1, 3, 36, 0, 0),
        ),
        # 32 unrolls do not divide by 3 learners.
        (uniform_node_map(3, 8), {}, {"batch_unrolls": 32}, (2, 3, 19, 0, 0)),
        (uniform_node_map(2, 8), {}, {"placement": "local"}, (2, 0, 0, 14, 0)),
        # Fractions of 32 ranks: 2, 6.4 and the rest.
        (uniform_node_map(1, 32), {"learners": 0.0625, "inference": 0.2}, {}, (2, 6, 24, 0, 0)),
        (uniform_node_map(1, 32), {"evaluators": 0.001}, {}, (1, 2, 28, 0, 1)),
        # A quarter of 10 is 2.5 and is rounded up.
        (uniform_node_map(1, 10), {"inference": 0.25}, {}, (1, 3, 6, 0, 0)),
        # 0.1, 0.2 and 0.7 of 12 are 1.2, 2.4 and 8.4: the actors take what rounding leaves.
        (
            uniform_node_map(1, 12),
            {"learners": 0.1, "inference": 0.2, "actors": 0.7},
            {},
            (1, 2, 9, 0, 0),
        ),
        # Given actors leave the rest to inference, given both leave it to the learners.
        (uniform_node_map(1, 9), {"actors": 6}, {}, (1, 2, 6, 0, 0)),
        (uniform_node_map(1, 9), {"actors": 4, "inference": 3}, {}, (2, 3, 4, 0, 0)),
    ],
)
def test_automatic_and_fractional_counts(nodes, config, demand, expected):
    topology = plan_topology(TopologyConfig(**config), nodes, RoleDemand(**demand))
    assert role_counts(topology) == expected


@pytest.mark.parametrize(
    ("config", "num_ranks", "message"),
    [
        (
            {"learners": 2, "inference": 4},
            4,
            "learners(2) + inference(4) + actors(auto) + evaluators(auto) = 2 + 4 + 4 + 0 = 10 "
            "> world size 4: found 4 ranks, need at least 10",
        ),
        ({}, 2, "= 1 + 1 + 1 + 0 = 3 > world size 2: found 2 ranks, need at least 3"),
        ({"actors": 9}, 4, "= 1 + 1 + 9 + 0 = 11 > world size 4: found 4 ranks, need at least 11"),
        (
            {"learners": 1, "inference": 1, "actors": 2, "evaluators": 0},
            6,
            "actors(2) + evaluators(0) = 1 + 1 + 2 + 0 = 4 < world size 6: ranks without a role: 2",
        ),
        ({"learners": 1, "inference": 1, "actors": 0.5}, 10, "= 1 + 1 + 5 + 0 = 7 < world size 10"),
        ({"learners": 0}, 4, "a run needs at least one learner"),
        ({"actors": 0}, 4, "the inference ranks (1) needs at least one of the actors (0)"),
        (
            {"learners": 2, "inference": 1},
            6,
            "the learners (2) needs at least one of the inference",
        ),
        ({"inference": 3, "actors": 2}, 6, "the inference ranks (3) needs at least one of the act"),
        ({"learners": 0.5, "inference": 0.5, "actors": 0.9}, 4, "learners(0.5) + inference(0.5)"),
    ],
)
def test_impossible_counts_are_refused_with_the_whole_equation(config, num_ranks, message):
    with pytest.raises(TopologyError) as error:
        plan_topology(TopologyConfig(**config), uniform_node_map(1, num_ranks))
    assert message in str(error.value)
    assert "learners(" in str(error.value)
    assert "evaluators(" in str(error.value)


def test_local_layouts_speak_of_workers_and_refuse_inference_ranks():
    with pytest.raises(TopologyError, match=r"workers\(0\).*at least one of the workers"):
        plan_topology(TopologyConfig(actors=0), uniform_node_map(1, 4), LOCAL)
    with pytest.raises(TopologyError, match=r"inference\(2\): this layout acts locally"):
        plan_topology(TopologyConfig(inference=2), uniform_node_map(1, 4), LOCAL)
    with pytest.raises(TopologyError, match="found 1 ranks, need at least 2"):
        plan_topology(TopologyConfig(), uniform_node_map(1, 1), LOCAL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learners": 1.0}, "written without a decimal point"),
        ({"learners": -0.5}, "not a fraction of the world size"),
        ({"actors": float("nan")}, "finite"),
        ({"inference": -1}, "0 or more"),
        ({"actors": True}, "True is not a count"),
        ({"ranks": -1}, "greater than or equal to 0"),
        ({"learners": "many"}, "auto"),
        ({"learner": 1}, "learner"),
    ],
)
def test_configuration_refuses_values_that_are_no_counts(values, message):
    with pytest.raises(ValidationError, match=message):
        TopologyConfig(**values)


def test_local_launch_starts_the_sum_of_the_counts_or_fills_the_cores():
    central = RoleDemand()
    assert local_world_size(TopologyConfig(), central, num_cores=2) == 1 + 1 + 2
    assert local_world_size(TopologyConfig(), central, num_cores=16) == 16
    assert local_world_size(TopologyConfig(learners=2), central, num_cores=2) == 2 + 2 + 2
    assert local_world_size(TopologyConfig(actors=40), central, num_cores=2) == 1 + 3 + 40
    assert local_world_size(TopologyConfig(evaluators=1), LOCAL, num_cores=2) == 1 + 2 + 1
    assert local_world_size(TopologyConfig(ranks=7, actors=0.5), central, num_cores=2) == 7
    with pytest.raises(
        TopologyError, match=r"topology.inference is the fraction 0.25.*set topology"
    ):
        local_world_size(TopologyConfig(inference=0.25), central, num_cores=2)


@given(
    learners=st.sampled_from(["auto", 1, 2, 3]),
    inference=st.sampled_from(["auto", 3, 5]),
    actors=st.sampled_from(["auto", 5, 37]),
    evaluators=st.sampled_from(["auto", 0, 2]),
    num_cores=st.integers(1, 80),
)
def test_local_launch_size_is_one_that_the_plan_accepts(
    learners, inference, actors, evaluators, num_cores
):
    config = TopologyConfig(
        learners=learners, inference=inference, actors=actors, evaluators=evaluators
    )
    size = local_world_size(config, RoleDemand(), num_cores)
    check_topology(plan_topology(config, uniform_node_map(1, size)))
