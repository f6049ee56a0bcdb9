"""Node maps, and the topology as indices, text and JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.topology import (
    TABLE_HEADER,
    NodeInfo,
    TopologyConfig,
    TopologyError,
    format_ranks,
    node_map,
    plan_topology,
    table_rows,
    uniform_node_map,
)
from tests.oracles.topology import MAPS, parse_ranks, spread_nodes


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), "holds no ranks"),
        ((NodeInfo("a", (0, 1)), NodeInfo("b", (1, 2))), "each rank from 0 to 3 once"),
        ((NodeInfo("a", (0, 2, 3)),), "it holds 0,2-3"),
        ((NodeInfo("a", (0, 1)), NodeInfo("a", (2, 3))), "names a host twice"),
    ],
)
def test_node_maps_that_do_not_hold_each_rank_once_are_refused(nodes, message):
    with pytest.raises(TopologyError, match=message):
        plan_topology(TopologyConfig(), nodes)


def test_node_map_groups_ranks_by_host_and_refuses_masks_per_task():
    hosts, cores = ["b", "a", "b", "a"], [[0, 1], range(8), [1, 4], range(8)]
    everywhere = node_map(hosts, [("0", "1")] * 4, cores)
    # Ranks of b are bound to cores of their own, but for one; those of a to none.
    assert everywhere == (NodeInfo("b", (0, 2), 2, 3), NodeInfo("a", (1, 3), 2, 8))
    with pytest.raises(TopologyError, match=r"node b: rank 0 sees .*GPU-1.* rank 2 sees .*GPU-2"):
        node_map(hosts, [("GPU-1",), ("GPU-1",), ("GPU-2",), ("GPU-1",)], cores)


def test_uniform_node_map_deals_ranks_in_blocks_or_cycles():
    assert [n.ranks for n in uniform_node_map(2, 3)] == [(0, 1, 2), (3, 4, 5)]
    cyclic = uniform_node_map(2, 3, 4, 8, distribution="cyclic")
    assert cyclic == (NodeInfo("node0", (0, 2, 4), 4, 8), NodeInfo("node1", (1, 3, 5), 4, 8))
    with pytest.raises(TopologyError, match="0 nodes of 3 ranks: both must be at least 1"):
        uniform_node_map(0, 3)


def test_roles_are_numbered_by_rank_whatever_node_they_are_on():
    topology = plan_topology(
        TopologyConfig(learners=2, inference=2), uniform_node_map(2, 4, distribution="cyclic")
    )
    for role in ("learner", "inference", "actor"):
        ranks = topology.ranks_of(role)
        assert [topology.index_of_role[rank] for rank in ranks] == list(range(len(ranks)))
    assert topology.cell_of[topology.learner_ranks[1]] == 1


@given(st.sets(st.integers(0, 60), min_size=1))
def test_rank_lists_read_back_as_they_were(ranks):
    assert parse_ranks(format_ranks(sorted(ranks))) == sorted(ranks)


def test_rank_lists_are_short():
    assert format_ranks([0, 1, 2, 3, 8, 10, 14, 18]) == "0-3,8,10-18:4"
    assert format_ranks(range(0, 100, 4)) == "0-96:4"


@pytest.mark.parametrize("kind", MAPS)
def test_table_shows_each_rank_in_one_row_with_its_role_and_place(kind):
    topology = plan_topology(
        TopologyConfig(learners=2, inference=4, evaluators=1), spread_nodes(41, 3, kind, 2)
    )
    seen = []
    for row in table_rows(topology):
        shown = dict(zip(TABLE_HEADER, row, strict=True))
        ranks = parse_ranks(shown["ranks"])
        seen += ranks
        for rank, index in zip(ranks, parse_ranks(shown["index"]), strict=True):
            assert shown["host"] == topology.host_of(rank)
            assert shown["role"] == topology.role_of[rank]
            assert index == topology.index_of_role[rank]
            assert int(shown["cell"]) == topology.cell_of[rank]
            parent = topology.parent_of[rank]
            assert shown["served by"].split()[0] == ("-" if parent is None else str(parent))
    assert sorted(seen) == list(range(41))
    text = topology.table()
    assert "41 ranks on 3 nodes: 2 learners, 4 inference ranks, 34 actors, 1 evaluator" in text


def test_table_of_a_small_job_is_this():
    topology = plan_topology(TopologyConfig(), uniform_node_map(1, 6, 1))
    assert topology.table().splitlines() == [
        "host   ranks  role       index  cell  served by  device",
        "node0  0      learner    0      0     -          gpu 0",
        "node0  1      inference  0      0     0          cpu",
        "node0  2-5    actor      0-3    0     1          cpu",
        "",
        "6 ranks on 1 node: 1 learner, 1 inference rank, 4 actors",
        "actors per inference rank: 4; links between nodes: 0; GPUs used: 1 of 1",
        "note: 1 of the learner and inference ranks use the CPU because no GPU was left for them "
        "(the first is rank 1, inference); topology.allow_gpu_sharing lets them share one",
    ]


def test_json_says_for_each_rank_what_the_topology_says():
    topology = plan_topology(TopologyConfig(), uniform_node_map(2, 8, 2, 16))
    data = json.loads(json.dumps(topology.to_json()))
    assert data["world_size"] == 16
    assert data["nodes"][1] == {"host": "node1", "num_gpus": 2, "num_cores": 16}
    assert data["ranks"][9] == {
        "rank": 9,
        "host": "node1",
        "role": "inference",
        "index": 1,
        "cell": 1,
        "gpu": 1,
        "served_by": 8,
    }
