"""Teams: the ranks that step one environment together, planned like every other role."""

import itertools
import re

import pytest

from hpcrl.topology import (
    NodeInfo,
    RoleDemand,
    TopologyConfig,
    TopologyError,
    local_world_size,
    plan_topology,
    uniform_node_map,
)
from tests.oracles.topology import MAPS, check_topology, spread_nodes


def check_teams(topology, size, leader):
    """Every leader has size - 1 followers; every rank of a team knows all of it."""
    leaders = topology.ranks_of(leader)
    followers = topology.ranks_of("follower")
    assert len(followers) == (size - 1) * len(leaders)
    for rank in leaders:
        team = (rank, *(f for f in followers if topology.parent_of[f] == rank))
        assert len(team) == size
        assert all(topology.team_of[member] == team for member in team)
        assert all(topology.leader_of(member) == rank for member in team)
    assert len(topology.team_of) == size * len(leaders)


def test_given_counts_of_every_size_form_whole_teams():
    for size, actors, inference, num_nodes, kind in itertools.product(
        (2, 3, 4), range(2, 9), (1, 2), range(1, 4), MAPS
    ):
        world_size = 1 + inference + size * actors
        config = TopologyConfig(learners=1, inference=inference, actors=actors)
        nodes = spread_nodes(world_size, num_nodes, kind, 0)
        topology = plan_topology(config, nodes, RoleDemand(ranks_per_env=size))
        check_topology(topology, learner=1, inference=inference, actor=actors)
        check_teams(topology, size, "actor")


def test_automatic_counts_leave_no_rank_without_a_role_or_name_worlds_that_fit():
    refused = 0
    for size, world_size in itertools.product((2, 3, 4), range(8, 80)):
        demand = RoleDemand(ranks_per_env=size)
        sizes = [world_size]
        try:
            plan_topology(TopologyConfig(), spread_nodes(world_size, 2, "block", 0), demand)
        except TopologyError as error:
            refused += 1
            sizes = [int(n) for n in re.findall(r"(\d+) or (\d+) ranks", str(error))[0]]
        for fitting in sizes:
            nodes = spread_nodes(fitting, 2, "block", 0)
            topology = plan_topology(TopologyConfig(), nodes, demand)
            check_topology(topology)
            check_teams(topology, size, "actor")
    assert refused < 15


def test_workers_lead_teams_too():
    demand = RoleDemand(placement="local", ranks_per_env=3)
    topology = plan_topology(TopologyConfig(learners=2), uniform_node_map(2, 7), demand)
    check_topology(topology, learner=2, worker=4)
    check_teams(topology, 3, "worker")
    # Cells feed their own learner, and nobody's team leaves its node.
    assert {topology.node_of[r] for r in topology.team_of[1]} == {0}
    assert topology.notes == ()


def test_a_team_stays_on_its_node_where_the_ranks_allow_it():
    # 1 learner + 1 inference rank on the first of two nodes with 6 ranks: 4 and 6 are left.
    config = TopologyConfig(learners=1, inference=1)
    topology = plan_topology(config, uniform_node_map(2, 6), RoleDemand(ranks_per_env=2))
    homes = [{topology.node_of[r] for r in team} for team in topology.team_of.values()]
    assert all(len(home) == 1 for home in homes)
    assert topology.notes == ()


def test_ranks_that_make_no_whole_team_on_their_node_are_joined_and_it_is_said():
    # 3 and 5 ranks are left: a team of 2 on the first node, two on the second, one on both.
    nodes = (NodeInfo("a", (0, 1, 2, 3, 4)), NodeInfo("b", (5, 6, 7, 8, 9)))
    config = TopologyConfig(learners=1, inference=1)
    topology = plan_topology(config, nodes, RoleDemand(ranks_per_env=2))
    check_teams(topology, 2, "actor")
    homes = [{topology.node_of[r] for r in team} for team in set(topology.team_of.values())]
    across = [home for home in homes if len(home) == 2]
    assert len(homes) == 4
    assert len(across) in (0, 1)
    assert any("1 of 4 teams have ranks on several nodes" in n for n in topology.notes) == bool(
        across
    )


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (
            {"learners": 1, "inference": 1, "actors": 2},
            {},
            "followers(2 per actor) + evaluators(auto) = 1 + 1 + 2 + 4 + 0 = 8 < world size 10: "
            "ranks without a role: 2; start 8 ranks, or set topology.actors to auto",
        ),
        (
            {"learners": 1, "inference": 1},
            {},
            "ranks without a role: 2; they make no whole team of 3: start 8 or 11 ranks",
        ),
        ({"learners": 1, "inference": 1, "actors": 3}, {}, "need at least 11"),
        ({"evaluators": 1}, {}, "set topology.evaluators to 0"),
        ({}, {3: "actor"}, "HPCRL_ROLE gives ranks 3 a place in a team of 3"),
        ({}, {3: "follower"}, "HPCRL_ROLE gives ranks 3 a place in a team of 3"),
    ],
)
def test_impossible_teams_are_refused_with_the_equation(config, overrides, message):
    with pytest.raises(TopologyError) as caught:
        plan_topology(
            TopologyConfig(**config),
            uniform_node_map(1, 10),
            RoleDemand(ranks_per_env=3),
            overrides,
        )
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("cores", "config", "size"),
    [
        (2, {}, 1 + 1 + 2 * 2),  # two actors at least
        (18, {}, 1 + 1 + 2 * 8),
        (2, {"actors": 3, "learners": 2, "inference": 2}, 2 + 2 + 3 * 2),
    ],
)
def test_hpcrl_starts_ranks_for_whole_teams(cores, config, size):
    demand = RoleDemand(ranks_per_env=2)
    assert local_world_size(TopologyConfig(**config), demand, cores) == size
    plan_topology(TopologyConfig(**config), uniform_node_map(1, size), demand)
