"""How many threads torch gets in each role, and how many of them share a node."""

import pytest

from hpcrl.node import node_facts
from hpcrl.start.demand import demand_of
from hpcrl.topology import plan_topology, uniform_node_map
from tests.small import config_of

SEED: dict = {}
MLP = {"layout": "sync", "agent": {"name": "ppo"}}
SYNC = {**MLP, "network": {"torso": "nature_cnn"}}
SYNC_LOCAL = {**SYNC, "placement": "local"}
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HPCRL_THREADS")


@pytest.fixture
def threads_of(monkeypatch):
    """Threads of one rank of each role of a layout on a node of so many cores."""

    def threads(sections, ranks, cores, bound_to=1000, **topology):
        config = config_of(
            **{**sections, "topology": {"inference": "auto", "actors": "auto", **topology}}
        )
        nodes = uniform_node_map(1, ranks, cores_per_node=cores)
        plan = plan_topology(config.topology, nodes, demand_of(config))
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(bound_to))
        found = {}
        for rank, role in enumerate(plan.role_of):
            for variable in VARIABLES:
                monkeypatch.setenv(variable, "77")
            found[role] = node_facts.choose_threads(config, plan, rank)
        return found

    monkeypatch.setattr("os.nice", lambda increment: 0)
    return threads


def test_ranks_that_compute_share_the_cores_that_acting_leaves(threads_of):
    # 6 ranks: a learner, an inference rank and 4 actors; 16 - 4 = 12 cores for two.
    expected = {"learner": 6, "inference": 6, "actor": 1}
    assert threads_of(SEED, 6, 16, inference=1) == expected


def test_a_learner_that_acting_waits_for_has_the_whole_node(threads_of):
    expected = {"learner": 16, "inference": 6, "actor": 1}
    assert threads_of(SYNC, 6, 16, inference=1) == expected
    assert threads_of(SYNC_LOCAL, 6, 16) == {"learner": 16, "worker": 1}


def test_a_dense_network_is_too_small_for_that(threads_of):
    expected = {"learner": 6, "inference": 6, "actor": 1}
    assert threads_of(MLP, 6, 16, inference=1) == expected


def test_several_learners_share_it(threads_of):
    assert threads_of(SYNC, 8, 16, learners=2, inference=2)["learner"] == 8


def test_nobody_has_more_threads_than_cores_it_is_bound_to(threads_of):
    assert threads_of(SYNC, 6, 16, bound_to=3, inference=1)["learner"] == 3
    assert threads_of(SEED, 6, 16, bound_to=1, inference=1)["learner"] == 1


def test_everyone_has_one_where_ranks_outnumber_cores(threads_of):
    expected = {"learner": 1, "inference": 1, "actor": 1}
    assert threads_of(SEED, 6, 2, inference=1) == expected


def test_the_users_number_goes_first(threads_of):
    asked = {**SYNC, "learner": {"threads": 5, "batch_unrolls": 2, "unroll_steps": 3}}
    assert threads_of(asked, 6, 16, inference=1)["learner"] == 5


@pytest.mark.parametrize(
    ("isolation", "threads"),
    [("none", 6), ("process", 6 + 3 * 2 + 1)],  # 3 actors of 2 groups, and an evaluator
)
def test_children_that_step_environments_want_cores_too(isolation, threads):
    config = config_of(
        env={"envs_per_actor": 4, "groups": 2, "isolation": isolation},
        topology={"inference": 1, "actors": 3, "evaluators": 1},
    )
    nodes = uniform_node_map(2, 6)
    twelve = {"learners": 2, "inference": 2, "actors": 6, "evaluators": 2}
    plan = plan_topology(config_of(topology=twelve).topology, nodes, demand_of(config))
    counts = [
        sum(plan.role_of[rank] == role for rank in plan.nodes[0].ranks)
        for role in ("actor", "evaluator")
    ]
    assert counts == [3, 1]
    assert node_facts.threads_beside(config, plan, plan.nodes[0].ranks[0]) == threads


@pytest.mark.parametrize(("layout", "crowded"), [(SEED, False), (MLP, False), (SYNC, True)])
def test_a_node_whose_learner_computes_on_all_cores_is_crowded(layout, crowded):
    config = config_of(**{**layout, "topology": {"inference": 1, "actors": 4}})
    nodes = uniform_node_map(1, 6, cores_per_node=16)
    plan = plan_topology(config.topology, nodes, demand_of(config))
    assert node_facts.threads_beside(config, plan, 0) == (16 + 6 + 4 if crowded else 16)
