"""Topology: the property sweep over the grid of sizes, placement, links, GPUs and overrides."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.topology import (
    NodeInfo,
    Role,
    RoleDemand,
    Topology,
    TopologyConfig,
    TopologyError,
    plan_topology,
    uniform_node_map,
)
from hpcrl.topology.assignment import assign_balanced
from tests.oracles.topology import MAPS, check_gpus, check_topology, role_counts, spread_nodes

LOCAL = RoleDemand(placement="local")


def _grid():
    """Every world size, learner count, node count and rank map; GPUs and inference in turn."""
    turn = itertools.count()
    for world_size in range(3, 71):
        for learners in range(1, 5):
            for num_nodes in range(1, 6):
                for kind in MAPS:
                    most = (world_size - learners) // 2
                    for inference in {learners, 2 * learners, (learners + most) // 2, most}:
                        if learners <= inference <= most and num_nodes <= world_size:
                            yield world_size, learners, inference, num_nodes, kind, next(turn) % 5


def test_every_size_of_the_grid_gives_balanced_connected_cells():
    cases = 0
    for world_size, learners, inference, num_nodes, kind, gpus in _grid():
        config = TopologyConfig(learners=learners, inference=inference)
        nodes = spread_nodes(world_size, num_nodes, kind, gpus)
        topology = plan_topology(config, nodes)
        actors = world_size - learners - inference
        check_topology(topology, learner=learners, inference=inference, actor=actors)
        assert topology.root_learner == 0
        slots = sum(min(gpus, len(node.ranks)) for node in nodes)
        on_gpu = [rank for rank, device in enumerate(topology.device_of) if device is not None]
        assert len(on_gpu) == min(slots, learners + inference)
        assert sum(topology.role_of[r] == "learner" for r in on_gpu) == min(slots, learners)
        assert topology == plan_topology(config, tuple(reversed(nodes)))
        cases += 1
    assert cases > 9000


def test_automatic_counts_fit_every_world():
    for world_size, num_nodes, kind, gpus in itertools.product(
        range(3, 71), range(1, 6), MAPS, range(5)
    ):
        nodes = spread_nodes(world_size, num_nodes, kind, gpus)
        central = plan_topology(TopologyConfig(), nodes)
        check_topology(central, worker=0, evaluator=0)
        local = plan_topology(TopologyConfig(), nodes, LOCAL)
        check_topology(local, actor=0, inference=0, evaluator=0)
        assert set(local.learner_of) == set(local.ranks_of("worker"))


@given(data=st.data())
def test_unequal_nodes_and_some_overrides_keep_every_property(data):
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    gpus = data.draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)))
    world_size = sum(sizes)
    if world_size < 4:
        return
    ranks = data.draw(st.permutations(range(world_size)))
    bounds = [0, *itertools.accumulate(sizes)]
    nodes = tuple(
        NodeInfo(f"n{i}", tuple(ranks[bounds[i] : bounds[i + 1]]), gpus[i])
        for i in range(len(sizes))
    )
    learners = data.draw(st.integers(1, max(1, (world_size - 1) // 3)))
    inference = data.draw(st.integers(learners, (world_size - 1 - learners) // 2))
    evaluators = data.draw(st.integers(0, world_size - learners - 2 * inference))
    pool = ["learner"] * learners + ["inference"] * inference + ["evaluator"] * evaluators
    pool += ["actor"] * (world_size - len(pool))
    dealt = data.draw(st.permutations(pool))
    pinned = data.draw(st.sets(st.integers(0, world_size - 1)))
    overrides = {rank: dealt[rank] for rank in pinned}
    config = TopologyConfig(learners=learners, inference=inference, evaluators=evaluators)
    topology = plan_topology(config, nodes, overrides=overrides)
    check_topology(topology, learner=learners, inference=inference, evaluator=evaluators)
    assert all(topology.role_of[rank] == role for rank, role in overrides.items())
    assert topology == plan_topology(config, nodes, overrides=overrides)


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_actors_stay_at_home_where_equal_nodes_serve_alike(distribution, gpus):
    for num_nodes, ranks_per_node in itertools.product(range(1, 6), range(6, 20)):
        nodes = uniform_node_map(num_nodes, ranks_per_node, gpus, distribution=distribution)
        for per_node, evaluators in itertools.product((1, 2), range(num_nodes + 1)):
            for learners in range(1, num_nodes + 1):
                config = TopologyConfig(
                    learners=learners, inference=per_node * num_nodes, evaluators=evaluators
                )
                topology = plan_topology(config, nodes)
                assert all(
                    topology.node_of[actor] == topology.node_of[inference]
                    for actor, inference in topology.inference_of.items()
                )


def test_cells_stay_at_home_where_each_node_has_a_learner():
    nodes = uniform_node_map(4, 32, 4)
    config = TopologyConfig(learners=4, inference=12)
    topology = plan_topology(config, nodes)
    assert all(
        parent is None or topology.node_of[rank] == topology.node_of[parent]
        for rank, parent in enumerate(topology.parent_of)
    )
    assert [topology.device_of[r] for r in topology.learner_ranks] == [0, 0, 0, 0]
    assert [topology.device_of[r] for r in topology.ranks_of("inference")] == [1, 2, 3] * 4


def test_a_lone_inference_rank_is_beside_its_learner():
    topology = plan_topology(TopologyConfig(learners=1, inference=1), uniform_node_map(4, 8))
    assert [topology.host_of(rank) for rank in topology.ranks_of("inference")] == ["node0"]


def _most_at_home(clients, servers, node_of):
    """Most clients that any balanced assignment keeps at home, by trying all larger shares."""
    base, larger = divmod(len(clients), len(servers))
    best = 0
    for chosen in itertools.combinations(servers, larger):
        room: Counter[int] = Counter()
        for server in servers:
            room[node_of[server]] += base + (server in chosen)
        here = Counter(node_of[client] for client in clients)
        best = max(best, sum(min(room[node], here[node]) for node in here))
    return best


@given(
    st.lists(st.integers(0, 3), max_size=14), st.lists(st.integers(0, 3), min_size=1, max_size=7)
)
def test_assignment_is_balanced_and_keeps_as_many_clients_at_home_as_possible(client_at, server_at):
    node_of = [*client_at, *server_at]
    clients = list(range(len(client_at)))
    servers = list(range(len(client_at), len(node_of)))
    server_of = assign_balanced(clients, servers, node_of)
    assert sorted(server_of) == clients
    loads = Counter(server_of.values())
    assert max(loads[s] for s in servers) - min(loads[s] for s in servers) <= 1
    at_home = sum(node_of[client] == node_of[server] for client, server in server_of.items())
    assert at_home == _most_at_home(clients, servers, node_of)


def test_evaluators_have_a_learner_and_send_it_nothing():
    topology = plan_topology(
        TopologyConfig(learners=2, inference=2, evaluators=3), uniform_node_map(1, 12)
    )
    evaluators = topology.ranks_of("evaluator")
    assert {topology.learner_of[rank] for rank in evaluators} == set(topology.learner_ranks)
    assert not set(evaluators) & {r for ranks in topology.clients_of.values() for r in ranks}


def test_clients_without_a_server_are_refused():
    with pytest.raises(ValueError, match="2 clients, but no server"):
        assign_balanced([0, 1], [], [0, 0])


def test_larger_shares_are_dealt_over_the_learners():
    # 10 actors on 4 inference ranks of 2 learners: 3 + 2 each, not 3 + 3 and 2 + 2.
    topology = plan_topology(TopologyConfig(learners=2, inference=4), uniform_node_map(1, 16))
    actors = [topology.cell_of[rank] for rank in topology.ranks_of("actor")]
    assert Counter(actors) == {0: 5, 1: 5}


# Overrides -------------------------------------------------------------------------------


def test_overrides_of_a_heterogeneous_launch_set_the_automatic_counts():
    # srun HPCRL_ROLE=learner : HPCRL_ROLE=inference : (the rest)
    roles: dict[int, Role] = {0: "actor", 5: "learner", 6: "inference", 7: "inference"}
    topology = plan_topology(TopologyConfig(), uniform_node_map(1, 12), overrides=roles)
    assert role_counts(topology) == (1, 2, 9, 0, 0)
    assert topology.root_learner == 5
    assert any("rank 5, not rank 0" in note for note in topology.notes)
    evaluating = plan_topology(TopologyConfig(), uniform_node_map(1, 4), overrides={3: "evaluator"})
    assert role_counts(evaluating) == (1, 1, 1, 0, 1)


def test_ranks_pinned_as_actors_leave_the_others_to_the_planner():
    nodes = (NodeInfo("gpu", (0, 1, 2, 3), 4), NodeInfo("cpu", tuple(range(4, 36))))
    overrides: dict[int, Role] = dict.fromkeys(range(4, 36), "actor")
    topology = plan_topology(TopologyConfig(), nodes, overrides=overrides)
    check_topology(topology)
    assert topology.role_of[0] == "learner"
    assert {topology.node_of[rank] for rank in topology.ranks_of("inference")} == {0}


def test_pinned_gpu_roles_use_up_the_gpus_of_their_node():
    nodes = uniform_node_map(2, 8, 1)
    overrides: dict[int, Role] = {3: "inference"}
    topology = plan_topology(TopologyConfig(learners=1), nodes, overrides=overrides)
    assert topology.host_of(topology.root_learner) == "node1"
    assert topology.device_of[3] == topology.device_of[topology.root_learner] == 0


def test_automatic_inference_counts_only_the_ranks_that_are_not_pinned():
    # 39 ranks beside the learner would have 3 inference ranks, but only one may move.
    overrides: dict[int, Role] = dict.fromkeys(range(2, 40), "actor")
    topology = plan_topology(TopologyConfig(), uniform_node_map(1, 40), overrides=overrides)
    assert role_counts(topology) == (1, 1, 38, 0, 0)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ({"learners": 1}, {0: "learner", 2: "learner"}, r"2 ranks learners \(0,2\).*room for 1"),
        ({}, dict.fromkeys(range(6), "actor"), r"6 ranks actors \(0-5\), but there is room for 4"),
        ({}, {3: "worker"}, "rank 3 worker, but this layout has only the roles learner, inf"),
        ({}, {6: "actor"}, "for rank 6, but the last rank is 5"),
    ],
)
def test_overrides_that_contradict_the_counts_are_refused(config, overrides, message):
    with pytest.raises(TopologyError, match=message):
        plan_topology(TopologyConfig(**config), uniform_node_map(1, 6), overrides=overrides)


# GPUs ------------------------------------------------------------------------------------


def test_gpu_roles_go_where_the_gpus_are_even_when_rank_0_is_elsewhere():
    nodes = (NodeInfo("cpu", tuple(range(32))), NodeInfo("gpu", (32, 33, 34, 35), 4))
    topology = plan_topology(TopologyConfig(learners=1, inference=3), nodes)
    assert [topology.host_of(rank) for rank in topology.learner_ranks] == ["gpu"]
    assert topology.device_of[32:] == (0, 1, 2, 3)
    cpu_only = RoleDemand(learner_device="cpu", inference_device="cpu")
    topology = plan_topology(TopologyConfig(learners=1, inference=3), nodes, cpu_only)
    assert topology.root_learner == 0
    assert set(topology.device_of) == {None}


def test_a_gpu_is_shared_only_when_allowed():
    nodes = uniform_node_map(1, 8, 1)
    alone = plan_topology(TopologyConfig(learners=1, inference=2), nodes)
    assert alone.device_of[:3] == (0, None, None)
    assert any("2 of the learner and inference ranks use the CPU" in n for n in alone.notes)
    sharing = TopologyConfig(learners=1, inference=2, allow_gpu_sharing=True)
    shared = plan_topology(sharing, nodes)
    assert shared.device_of[:3] == (0, 0, 0)
    two = plan_topology(sharing, uniform_node_map(1, 8, 2))
    assert two.device_of[:3] == (0, 1, 0)
    check_gpus(two, allow_sharing=True)


def test_sharing_keeps_gpu_roles_on_the_nodes_with_gpus():
    nodes = (NodeInfo("gpu", tuple(range(8)), 1), NodeInfo("cpu", tuple(range(8, 40))))
    config = TopologyConfig(learners=1, inference=3, allow_gpu_sharing=True)
    topology = plan_topology(config, nodes)
    assert topology.device_of[:4] == (0, 0, 0, 0)
    assert topology.role_of[8:] == ("actor",) * 32


def test_a_role_that_must_have_a_gpu_and_finds_none_is_refused():
    forced = RoleDemand(inference_device="gpu")
    with pytest.raises(
        TopologyError, match=r"rank 1 \(inference\) must have a GPU, but node node0"
    ):
        plan_topology(TopologyConfig(), uniform_node_map(1, 4), forced)
    with pytest.raises(
        TopologyError, match=r"has 1 for 2 ranks that want one; .*allow_gpu_sharing"
    ):
        plan_topology(TopologyConfig(), uniform_node_map(1, 4, 1), forced)
    sharing = TopologyConfig(allow_gpu_sharing=True)
    topology = plan_topology(sharing, uniform_node_map(1, 4, 1), forced)
    assert topology.device_of == (0, 0, None, None)


def test_notes_name_unused_gpus_learners_on_the_cpu_and_uneven_cells():
    spare = plan_topology(TopologyConfig(learners=1, inference=1), uniform_node_map(1, 8, 4))
    assert any("2 of 4 GPUs are unused" in note for note in spare.notes)
    mixed = plan_topology(TopologyConfig(learners=2, inference=2), uniform_node_map(1, 8, 1))
    assert any("1 of 2 learners use the CPU" in note for note in mixed.notes)
    uneven = plan_topology(TopologyConfig(learners=2, inference=3), uniform_node_map(1, 17))
    assert any("fed by 4 to 8 actors" in note for note in uneven.notes)
    even = plan_topology(TopologyConfig(learners=2, inference=4), uniform_node_map(1, 18))
    assert even.notes == ()


def test_ten_thousand_ranks_are_laid_out():
    nodes = uniform_node_map(78, 128, 4)
    topology = plan_topology(TopologyConfig(evaluators=10), nodes)
    assert isinstance(topology, Topology)
    check_topology(topology, learner=78, inference=234, evaluator=10)
