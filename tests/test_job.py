"""Numbers that follow from a rank's place: environments, seeds, slots and credits."""

from itertools import chain
from pathlib import Path

import pytest

from hpcrl.comm.loopback import World
from hpcrl.comm.slots import Client
from hpcrl.job import Job, Seat
from hpcrl.topology import plan_topology, uniform_node_map
from tests.small import config_of, env_spec


def seats(learners=1, inference=2, actors=3, restart=0, nodes=1, overrides=None, **sections):
    """The seat of every rank."""
    counts = {"learners": learners, "inference": inference, "actors": actors}
    config = config_of(topology=counts, **sections)
    size = learners + inference + actors
    topology = plan_topology(
        config.topology, uniform_node_map(nodes, size // nodes), None, overrides
    )
    world = World(size)
    links = [world.link(rank) for rank in range(size)]
    return [
        Seat(config, topology, link, link.group(range(size)), Path("run"), restart)
        for link in links
    ]


def jobs(**arguments):
    return [
        Job(**vars(seat), env=env_spec(), behaviour={}, core_size=0) for seat in seats(**arguments)
    ]


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_every_environment_belongs_to_one_actor_and_one_slot(nodes):
    ranks = jobs(nodes=nodes, env={"envs_per_actor": 6, "groups": 3})
    topology = ranks[0].topology
    ids = [ranks[0].env_ids(actor).tolist() for actor in topology.ranks_of("actor")]
    assert list(chain(*ids)) == list(range(18))
    clients = [ranks[0].clients(rank) for rank in topology.ranks_of("inference")]
    expected = [Client(actor, group) for actor in topology.ranks_of("actor") for group in range(3)]
    assert sorted(chain(*clients)) == expected
    assert ranks[0].rows_per_slot == 2


def test_trap22_seeds_follow_role_and_index_and_never_the_rank():
    """The same role index has the same seed on whatever rank the topology puts it."""
    usual, moved = seats(), seats(overrides={0: "actor", 1: "actor", 5: "learner"})
    assert usual[0].topology.ranks_of("actor") == (3, 4, 5)
    assert moved[0].topology.ranks_of("actor") != (3, 4, 5)
    for role in ("env", "inference"):
        seeds = [usual[0].seed(role, index) for index in range(9)]
        assert [moved[3].seed(role, index) for index in range(9)] == seeds


def test_trap22_seeds_differ_by_role_index_run_seed_and_restart():
    seeds = [
        seat.seed(role, index)
        for run_seed in range(4)
        for restart in range(4)
        for seat in seats(restart=restart, run={"seed": run_seed})[:1]
        for role in ("env", "inference", "eval")
        for index in range(50)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_learners_queue_holds_two_of_its_batches_and_credits_cover_one():
    ranks = jobs(learners=2, inference=4, actors=4, learner={"batch_unrolls": 12})
    job = ranks[0]
    assert job.local_batch_unrolls == 6
    assert job.queue_slots_per_source(2) * 2 == 12
    assert job.queue_slots_per_source(5) * 5 >= 12
    assert job.credits(2) == 3
    assert job.credits(100) == 1
