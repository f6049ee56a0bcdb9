"""The model of a job against arithmetic: what must hold when one stage takes all the time."""

from dataclasses import replace

import pytest

from hpcrl.bench.project import Machine, limit_of, predict, topology_of
from hpcrl.bench.simulator import Network, SimulatedJob, choose_share
from hpcrl.bench.stage_costs import StageCosts
from tests.small import config_of

FREE = StageCosts(*[0.0] * 10, step_bytes=0, unroll_bytes=0, weights_bytes=0)
TINY = replace(FREE, env_s=1e-6, act_batch_s=1e-6, train_s=1e-6)
ROOMY = Machine(0, 64, 0, Network(latency_s=0.0, bytes_per_s=1e15), {})


def simulate(costs, machine=ROOMY, nodes=1, learner_steps=60, **sections):
    return predict(config_of(**sections), nodes, machine, costs, learner_steps)


def test_environments_are_the_limit_when_they_alone_take_time():
    found = simulate(
        replace(TINY, env_s=0.01),
        topology={"actors": 5},
        env={"envs_per_actor": 4, "groups": 2},
        inference={"max_wait_s": 0.0},
    )
    # Five actors, each of which steps one environment after the other in 10 ms.
    assert found["agent_steps_per_s"] == pytest.approx(500.0, rel=0.02)
    assert found["limit"] == "actors"


def test_environments_that_sleep_need_no_core():
    slept = replace(TINY, env_sleep_s=0.01)
    crowded = replace(ROOMY, cores_per_node=1)
    sections = {
        "topology": {"actors": 5},
        "env": {"envs_per_actor": 4, "groups": 2},
        "transport": {"wait": "spin"},
    }
    assert simulate(slept, crowded, **sections)["agent_steps_per_s"] == pytest.approx(500, rel=0.03)
    worked = replace(TINY, env_s=0.01)
    assert simulate(worked, crowded, **sections)["agent_steps_per_s"] == pytest.approx(100, rel=0.1)


def test_learners_are_the_limit_when_their_step_takes_the_time():
    found = simulate(replace(TINY, train_s=0.5, assemble_s=0.1))
    # Two unrolls of three steps in 0.6 s; the queue is full, so no step waits for a batch.
    assert found["agent_steps_per_s"] == pytest.approx(6 / 0.6, rel=0.02)
    assert found["limit"] == "learners"
    assert found["busy"]["learners"] == pytest.approx(1.0, abs=0.02)


def test_inference_is_the_limit_when_its_batches_take_the_time():
    found = simulate(
        replace(TINY, act_batch_s=0.1, act_row_s=0.01),
        env={"envs_per_actor": 4, "groups": 2},
        topology={"actors": 3},
        inference={"max_batch_rows": 12},
    )
    # Half of the 12 rows comes while the other half is served: 6 rows in 0.16 s.
    assert found["batch_rows"] in (pytest.approx(6.0), pytest.approx(12.0))
    rows = found["batch_rows"]
    assert found["agent_steps_per_s"] == pytest.approx(rows / (0.1 + 0.01 * rows), rel=0.05)
    assert found["limit"] == "inference ranks"


def test_a_worker_does_one_after_the_other():
    found = simulate(
        replace(TINY, env_s=0.01, act_row_s=0.03, record_row_s=0.01),
        layout="impala",
        topology={"inference": "auto", "actors": 4},
    )
    assert found["agent_steps_per_s"] == pytest.approx(4 / 0.05, rel=0.02)
    assert found["limit"] == "workers"


@pytest.mark.parametrize("placement", ["local", "central"])
def test_acting_and_learning_take_turns_where_acting_waits_for_weights(placement):
    found = simulate(
        replace(TINY, env_s=0.01, act_batch_s=0.02, train_s=0.3, assemble_s=0.06, weights_s=0.04),
        layout="sync",
        placement=placement,
        agent={"name": "ppo", "minibatches": 1},
        learner={"batch_unrolls": 4},
        env={"envs_per_actor": 2, "groups": 1},
        topology={"inference": "auto" if placement == "local" else 1, "actors": 2},
        inference={"max_wait_s": 0.0, "max_batch_rows": 4},
    )
    # Three steps of two environments in turn (0.02 s) and the choice of four actions (0.02 s
    # each), one of them for the bootstrap row; then the learner's step and the new weights.
    cycle_s = 3 * (0.02 + 0.02) + 0.02 + 0.36 + 0.04
    assert found["policy_lag"] == 0.0
    assert found["agent_steps_per_s"] == pytest.approx(12 / cycle_s, rel=0.06)


def test_a_replay_holds_acting_to_the_ratio():
    found = simulate(
        replace(TINY, train_s=0.2),
        layout="replay",
        agent={"name": "r2d2", "burn_in_steps": 1, "num_steps": 1},
        network={"core": "lstm", "core_size": 4},
        learner={"unroll_steps": 6, "batch_unrolls": 4},
        replay={"ratio": 0.5},
    )
    # Four items in 0.2 s are worth eight unrolls of six steps.
    assert found["agent_steps_per_s"] == pytest.approx(8 * 6 / 0.2, rel=0.05)


def test_lag_without_a_queue_is_that_of_the_row_that_two_unrolls_share():
    found = simulate(replace(TINY, env_s=0.01))
    # Of an unroll's three rows the first was chosen with the weights before the last step.
    assert found["policy_lag"] == pytest.approx(1 / 3)


def test_the_network_is_the_limit_when_unrolls_are_large():
    slow = replace(ROOMY, ranks_per_node=4, cores_per_node=4, network=Network(0.0, 1e6))
    costs = replace(TINY, env_s=1e-4, unroll_bytes=100_000)
    # One slot for each source: with two, the source on the learner's node alone fills its batches.
    sections = {
        "topology": {"learners": 1, "inference": 4, "actors": 11},
        "learner": {"batch_unrolls": 2, "unroll_steps": 3, "backend": "mpi", "queue_unrolls": 4},
    }
    found = simulate(costs, slow, 4, **sections)
    # An unroll of three steps takes 0.1 s into the learner's node; a quarter of them is sent there.
    assert found["limit"] == "network"
    assert found["busy"]["network"] == pytest.approx(1.0, abs=0.05)


def test_a_part_of_a_large_job_is_like_the_whole():
    costs = replace(TINY, env_s=0.002, act_batch_s=0.001, act_row_s=2e-4, train_s=0.02)
    config = config_of(
        topology={"learners": 4, "inference": 8, "actors": 32},
        learner={"batch_unrolls": 32},
        env={"envs_per_actor": 4, "groups": 2},
    )
    topology = topology_of(config, 1, replace(ROOMY, ranks_per_node=44))
    whole, cells, part = (
        SimulatedJob(config, topology, costs, ROOMY.network, most) for most in (10_000, 16, 8)
    )
    assert [len(job.learners) for job in (whole, cells, part)] == [4, 1, 1]
    assert (cells.share.scale, part.share.scale, part.share.thinning) == (4.0, 8.0, 2.0)
    rates = [job.run()["agent_steps_per_s"] for job in (whole, cells, part)]
    assert rates[1:] == pytest.approx([rates[0]] * 2, rel=0.03)


@pytest.mark.parametrize(
    ("env", "transport", "crowded", "sleeps"),
    [
        ({}, {}, False, False),
        # Four ranks, and a child process for each group of either actor.
        ({"isolation": "process"}, {}, True, True),
        ({"isolation": "process"}, {"wait": "spin"}, True, False),
    ],
)
def test_ranks_share_cores_with_the_children_that_step_environments(
    env, transport, crowded, sleeps
):
    config = config_of(
        topology={"learners": 1, "inference": 1, "actors": 2},
        env={"envs_per_actor": 4, "groups": 2, **env},
        transport={"deadline_s": 600.0, **transport},
    )
    topology = topology_of(config, 1, replace(ROOMY, cores_per_node=4))
    job = SimulatedJob(config, topology, TINY, ROOMY.network)
    assert (job.crowded, job.sleeps) == ({0: crowded}, {0: sleeps})


def test_whole_cells_are_chosen_and_the_first_only_is_divided():
    config = config_of(topology={"learners": 2, "inference": 4, "actors": 8})
    topology = topology_of(config, 1, replace(ROOMY, ranks_per_node=14))
    sizes = [
        [len(sources) for sources in choose_share(topology, 1, most).sources.values()]
        for most in (1, 2, 4, 5, 100)
    ]
    assert sizes == [[1], [1], [2], [2, 2], [2, 2]]


def test_more_cells_reduce_over_more_ranks():
    costs = replace(TINY, train_s=0.01, weights_bytes=1_000_000)
    slow = replace(ROOMY, ranks_per_node=3, cores_per_node=3, network=Network(0.0, 1e9))
    found = {}
    for learners in (1, 4):
        topology = {"learners": learners, "inference": "auto", "actors": "auto"}
        sections = {"learner": {"batch_unrolls": 8}, "topology": topology}
        found[learners] = simulate(costs, slow, learners, **sections)["learner_steps_per_s"]
    # Four learners take a quarter of the batch each and sum 1 MB: 2 * 1 MB * 3/4 at 1 GB/s.
    assert found[1] == pytest.approx(1 / 0.01, rel=0.05)
    assert found[4] == pytest.approx(1 / (0.01 / 4 + 0.0015), rel=0.15)


def test_the_limit_is_the_busiest_and_the_cores_where_all_want_them():
    busy = {"actors": 0.5, "learners": 0.9, "cores of a node": 0.93, "network": 0.1}
    assert limit_of(busy) == "learners"
    assert limit_of({**busy, "cores of a node": 0.99}) == "cores of a node"
