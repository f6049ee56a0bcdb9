"""Learners that share the parameters: every worker talks to all of them."""

import pytest

from hpcrl.topology import (
    TABLE_HEADER,
    RoleDemand,
    TopologyConfig,
    TopologyError,
    format_ranks,
    plan_topology,
    table_rows,
    uniform_node_map,
)

SHARDED = RoleDemand(placement="local", learner_device="cpu", sharded=True)


def planned(learners, nodes=1, ranks=6, gpus=0, overrides=None, **config):
    node_map = uniform_node_map(nodes, ranks, gpus)
    return plan_topology(TopologyConfig(learners=learners, **config), node_map, SHARDED, overrides)


@pytest.mark.parametrize("learners", [1, 2, 5])
def test_workers_have_all_learners_for_neighbours_and_the_other_way_round(learners):
    topology = planned(learners)
    workers = topology.ranks_of("worker")
    for rank in range(6):
        others = workers if topology.role_of[rank] == "learner" else topology.learner_ranks
        assert topology.neighbours_of(rank) == others


def test_without_shards_neighbours_are_parent_and_children():
    topology = plan_topology(TopologyConfig(learners=2, inference=2), uniform_node_map(1, 8))
    for rank in range(8):
        parent = topology.parent_of[rank]
        children = {r for r in range(8) if topology.parent_of[r] == rank}
        assert set(topology.neighbours_of(rank)) == children | ({parent} - {None})


def test_the_table_names_all_learners_and_links_between_nodes_are_those_of_the_mesh():
    topology = planned(2, nodes=2, ranks=3)
    rows = [dict(zip(TABLE_HEADER, row, strict=True)) for row in table_rows(topology)]
    served_by = {row["served by"] for row in rows if row["role"] == "worker"}
    assert served_by == {format_ranks(topology.learner_ranks)}
    crossing = sum(
        topology.node_of[worker] != topology.node_of[learner]
        for worker in topology.ranks_of("worker")
        for learner in topology.learner_ranks
    )
    assert f"links between nodes: {crossing};" in topology.table()
    assert "workers of every learner: 4" in topology.table()
    assert topology.to_json()["sharded"] is True


def test_nobody_takes_a_gpu_and_the_note_says_so():
    topology = planned(2, gpus=2)
    assert set(topology.device_of) == {None}
    assert topology.notes == ("2 GPUs are unused: in this layout workers and learners use the CPU",)


def test_uneven_cells_are_no_surprise_as_nobody_waits():
    assert planned(3, ranks=7).notes == ()


def test_one_worker_may_feed_several_learners_but_none_is_too_few():
    assert len(planned(5).ranks_of("worker")) == 1
    with pytest.raises(TopologyError, match="needs at least one worker"):
        planned(6, actors=0)


def test_an_evaluator_by_override_is_refused_with_the_roles_that_there_are():
    with pytest.raises(TopologyError, match="only the roles learner, worker"):
        planned(1, overrides={5: "evaluator"})
