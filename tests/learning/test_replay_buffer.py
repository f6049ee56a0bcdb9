"""From acting to a learner's replayed batch: states, priorities, weights, credit."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.comm.loopback import World
from hpcrl.comm.unroll_flow import UnrollOutbox
from hpcrl.job import Job
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.replay_buffer import ReplayBuffer
from hpcrl.learning.trainer import StepResult
from hpcrl.replay.importance import combine_summaries, one_buffer_weights, summarize_shard
from hpcrl.topology import plan_topology, uniform_node_map
from hpcrl.types import NetInputs
from tests.acting_tools import RECURRENT, Stage, weights

BURN_IN, UNROLL_STEPS, BATCH = 3, 5, 4


def sections(agent="r2d2", learners=1, batch=BATCH, replay=None, **parameters):
    settings = {"discount": 0.9, "num_steps": 3, "head_size": 8, **parameters}
    if agent == "r2d2":
        settings = {"burn_in_steps": BURN_IN, **settings}
    return {
        "layout": "replay",
        "agent": {"name": agent, **settings},
        "network": {"hidden_sizes": [8], **(RECURRENT if agent == "r2d2" else {})},
        "learner": {
            "batch_unrolls": batch,
            "unroll_steps": UNROLL_STEPS,
            "queue_unrolls": 1000,
            "backend": "mpi",
        },
        "replay": {"capacity_unrolls": 200, "min_size_unrolls": 1, "ratio": 1.0, **(replay or {})},
        "topology": {"learners": learners, "inference": learners, "actors": learners},
    }


def acted(kind, steps=120, **options):
    """Environments that explore in half of their steps."""
    stage = Stage(kind, unroll_steps=UNROLL_STEPS, **sections(**options))
    stage.policy._epsilon = torch.full((3,), 0.5)
    for _ in range(steps):
        stage.step()
    return stage


class Cell:
    """A learner's buffer, and the outbox of its inference rank."""

    def __init__(self, stage, learner=0):
        config = stage.brain._config
        topology = plan_topology(config.topology, uniform_node_map(1, 3 * config.topology.learners))
        world = World(topology.world_size)
        rank = topology.learner_ranks[learner]
        self.job = Job(
            config=config,
            topology=topology,
            link=world.link(rank),
            world=world.link(rank).group(range(topology.world_size)),
            run_dir=Path("no_such_directory"),
            restart=0,
            env=stage.spec,
            behaviour=stage.brain.behaviour,
            core_size=stage.brain.make_network(0).state_size,
            replay_items=stage.brain.window.items_per_unroll,
        )
        client = topology.clients_of[rank][0]
        self.outbox = UnrollOutbox(world.link(client), rank, stage.layout, 1000)
        self.buffer = ReplayBuffer(self.job, stage.brain.window)

    def send(self, unrolls):
        self.outbox.put(np.stack(unrolls))
        self.buffer.serve()


def network(stage):
    net = stage.brain.make_network(0)
    FlatParameters(net).value.copy_(torch.from_numpy(weights(stage.brain, 3)))
    return net.eval()


def agree(buffer, votes):
    """The outcome of the learners' votes."""
    reduce = {"sum": sum, "max": max, "min": min}
    outcome: dict[str, float] = {}
    for name, rule in buffer.rules.items():
        if rule == "each":
            outcome |= {f"{name}_{i}": float(vote[name]) for i, vote in enumerate(votes)}
        else:
            outcome[name] = float(reduce[rule](vote[name] for vote in votes))
    return outcome


def any_outcome(buffer):
    """For what does not depend on the other learners."""
    return agree(buffer, [{**dict.fromkeys(buffer.rules, 1.0), "size": 1}])


def result(priorities):
    return StepResult(0, {}, False, np.asarray(priorities, np.float32))


def step(buffer, priorities=None, agreed=None):
    """What the loop does with one learner, or with the votes of several."""
    buffer._all_filled = True
    vote = buffer.vote()
    taken = buffer.take(agreed or agree(buffer, [vote]))
    drawn = buffer._drawn
    buffer.feedback(result(np.ones(BATCH) if priorities is None else priorities))
    return taken, drawn


@pytest.mark.parametrize("kind", ["terminating", "truncating", "scripted", "next_step", "stacked"])
def test_trap04_unrolling_from_the_stored_state_gives_the_values_of_acting_time(kind):
    stage = acted(kind)
    cell = Cell(stage)
    cell.buffer._credit = -1e9  # takes in all that comes
    cell.send(stage.unrolls)
    views, net = stage.views(), network(stage)
    seen = set()
    for _ in range(60):
        sample = cell.buffer.shard.sample(BATCH, cell.buffer._rng)
        cell.buffer._drawn, cell.buffer._drawn_mass = sample, 1.0
        batch = cell.buffer.take(any_outcome(cell.buffer)).batch
        inputs = NetInputs(batch.observation, batch.reward, batch.previous_action, batch.start)
        with torch.no_grad():
            q, _ = net(inputs, batch.core_state)
        for column, unroll in enumerate(sample.generations):
            seen.add(int(unroll))
            recorded = torch.from_numpy(views["behaviour:q_greedy"][unroll])
            error = (q[BURN_IN:, column].max(-1).values - recorded).abs().max()
            assert error < 1e-5, (kind, unroll)
    # First unrolls of a run, whose burn-in rows never existed, are among them.
    assert {int(views["unroll_index"][unroll]) for unroll in seen} >= {0, 1, 2}
    assert views["start"].any()


def test_trap12_initial_priorities_come_from_the_greedy_action_where_behaviour_differs():
    stage = acted("terminating", rescale=False)
    views = stage.views()
    explored = 0
    for index in range(len(stage.unrolls)):
        row = {name: view[index] for name, view in views.items()}
        errors = []
        for t in range(UNROLL_STEPS):
            target, discount, at = 0.0, 1.0, t
            while at < min(t + 3, UNROLL_STEPS) and discount:
                at += 1
                target += discount * row["reward"][at]
                discount *= 0.0 if row["terminated"][at] else 0.9
            target += discount * row["behaviour:q_greedy"][at]
            errors.append(abs(target - row["behaviour:q_action"][t]))
        assert row["priority"][0] == pytest.approx(
            0.9 * max(errors) + 0.1 * np.mean(errors), rel=1e-4, abs=1e-5
        )
        explored += int((row["behaviour:q_action"] < row["behaviour:q_greedy"]).sum())
    assert explored > 20


@pytest.mark.parametrize("kind", ["terminating", "truncating", "scripted", "stacked"])
def test_apex_priorities_are_those_of_the_items_that_are_drawn(kind):
    """With the acting weights, |delta| of the loss on every item is its initial priority."""
    stage = acted(kind, agent="apex", steps=200)
    cell = Cell(stage)
    cell.buffer._credit = -1e9
    cell.send(stage.unrolls)
    net, shard = network(stage), cell.buffer.shard
    assert shard.size > 200
    finals = 0
    for _ in range(60):
        drawn = shard.sample(BATCH, cell.buffer._rng)
        cell.buffer._drawn, cell.buffer._drawn_mass = drawn, 1.0
        batch = cell.buffer.take(any_outcome(cell.buffer)).batch
        out = stage.brain.loss(net, batch, None, net)
        np.testing.assert_allclose(
            out.priorities.numpy(), shard.sampler.priority(drawn.slots), rtol=1e-3, atol=1e-4
        )
        assert not batch.final[0].any()
        finals += int(batch.final[1:].sum())
    assert finals or kind in ("terminating",)


def test_trap14_a_priority_for_an_evicted_item_never_lands_on_its_successor():
    stage = acted("terminating", steps=400, replay={"capacity_unrolls": 20, "ratio": 4.0})
    cell = Cell(stage)
    cell.send(stage.unrolls[:19])
    buffer = cell.buffer
    buffer._all_filled = True
    buffer.take(agree(buffer, [buffer.vote()]))
    drawn = buffer._drawn
    buffer._credit = -1e9
    cell.send(stage.unrolls[19:66])
    expected = buffer.shard.sampler.priority(np.arange(20))
    assert (buffer.shard.sampler.generation(drawn.slots) != drawn.generations).all()
    assert buffer.shard.sampler.is_live(drawn.slots).all()  # there are successors to hit
    buffer.feedback(result(np.full(BATCH, 77.0)))
    np.testing.assert_array_equal(buffer.shard.sampler.priority(np.arange(20)), expected)
    assert buffer.shard.counters.stale_updates == len(drawn.slots)


def test_trap15_an_item_with_priority_zero_is_still_drawn():
    stage = acted("terminating", replay={"priority_exponent": 0.1})
    cell = Cell(stage)
    cell.buffer._credit = -1e9
    cell.send(stage.unrolls[:12])
    shard = cell.buffer.shard
    live = np.flatnonzero(shard.sampler.is_live(np.arange(12)))
    shard.update_priorities(live, shard.sampler.generation(live), np.zeros(len(live)))
    drawn = shard.sample(500, np.random.default_rng(0)).slots
    assert set(drawn) == set(live)


def test_trap13_weights_are_those_of_one_buffer_whatever_the_shards():
    """Two learners with very different shards agree on mass, size and the largest weight."""
    stages = [acted("terminating", learners=2, batch=2 * BATCH, steps=n) for n in (60, 300)]
    cells = [Cell(stage, learner) for learner, stage in enumerate(stages)]
    for cell, stage, scale in zip(cells, stages, (100.0, 1.0), strict=True):
        cell.buffer._credit = -1e9
        cell.send(stage.unrolls)
        shard = cell.buffer.shard
        slots = np.flatnonzero(shard.sampler.is_live(np.arange(100)))
        rng = np.random.default_rng(3)
        shard.update_priorities(
            slots, shard.sampler.generation(slots), scale * rng.exponential(size=len(slots))
        )
        cell.buffer._credit, cell.buffer._all_filled = BATCH, True
    votes = [cell.buffer.vote() for cell in cells]
    agreed = agree(cells[0].buffer, votes)
    stats = combine_summaries([summarize_shard(c.buffer.shard.sampler, 0.5) for c in cells])
    assert agreed["mass"] == pytest.approx(stats.mass)
    assert agreed["size"] == stats.size
    found, expected = [], []
    for cell in cells:
        drawn, mass = cell.buffer._drawn, cell.buffer.shard.sampler.mass
        found += cell.buffer.take(agreed).batch.behaviour["weight"][0].tolist()
        expected += one_buffer_weights(drawn.probability, mass, 0.5, stats, 0.6).tolist()
    np.testing.assert_allclose(found, np.array(expected) / max(expected), rtol=1e-5)
    assert max(found) == pytest.approx(1.0)
    values = cells[0].buffer._values(agreed, stats)
    assert values["weight_smallest"] == pytest.approx(min(expected) / max(expected))


@pytest.mark.parametrize("ratio", [0.5, 0.75, 3.0])
def test_the_replay_ratio_is_held_exactly_and_neither_side_waits_for_ever(ratio):
    stage = acted("terminating", steps=500, replay={"ratio": ratio})
    cell = Cell(stage)
    cell.outbox.put(np.stack(stage.unrolls))
    buffer, steps = cell.buffer, 0
    for _ in range(2000):
        buffer.serve()
        buffer._all_filled = buffer._filled
        # Nobody stores without bound while training stands still.
        assert buffer._credit <= 2 * BATCH + ratio
        if buffer.ready():
            step(buffer)
            steps += 1
    stored = buffer.shard.counters.inserted_unrolls
    assert stored == len(stage.unrolls)
    # The first unroll fills the buffer to its minimum, and earns nothing.
    assert steps == int((stored - 1) * ratio / BATCH)


def test_nothing_is_drawn_before_every_shard_is_full_enough():
    """A learner that still fills votes now and then, so that the others don't give it up."""
    stages = [acted("terminating", learners=2, batch=2 * BATCH, steps=60) for _ in range(2)]
    full, filling = (Cell(stage, learner) for learner, stage in enumerate(stages))
    buffers = [full.buffer, filling.buffer]
    full.send(stages[0].unrolls)
    full.buffer._credit = 100.0
    assert full.buffer.ready()
    assert filling.buffer.ready()  # the first sign
    agreed = agree(full.buffer, [b.vote() for b in buffers])
    assert not any(b.agree(agreed, True) for b in buffers)
    assert full.buffer.ready()
    assert not filling.buffer.ready()
    filling.buffer._next_sign_s = 0.0
    assert filling.buffer.ready()
    filling.send(stages[1].unrolls)
    agreed = agree(full.buffer, [b.vote() for b in buffers])
    # This vote was without a batch, the next one is with one.
    assert not any(b.agree(agreed, True) for b in buffers)
    assert all(b.shard.counters.sampled_items == 0 for b in buffers)
    filling.buffer._credit = 0.0
    assert full.buffer.ready()
    assert not filling.buffer.ready()
    filling.buffer._credit = float(BATCH)
    agreed = agree(full.buffer, [b.vote() for b in buffers])
    assert all(b.agree(agreed, True) for b in buffers)
    assert all(b.take(agreed).batch.reward.shape[1] == BATCH for b in buffers)


def test_steps_stored_are_counted_once_and_evaluation_environments_store_nothing():
    stage = acted("truncating", steps=200, evaluation_envs=1)
    assert set(stage.views()["env_id"]) == {0, 1}
    cell = Cell(stage)
    counted = 0
    cell.outbox.put(np.stack(stage.unrolls))
    for _ in range(2000):
        cell.buffer.serve()
        cell.buffer._all_filled = cell.buffer._filled
        if cell.buffer.ready():
            counted += step(cell.buffer)[0].num_steps
    counted += int(cell.buffer.vote()["stored_steps"])
    assert counted == int((~stage.views()["final"][:, :-1]).sum())


def test_a_capacity_that_can_never_begin_is_refused():
    stage = acted("terminating", steps=1, replay={"capacity_unrolls": 10, "min_size_unrolls": 50})
    with pytest.raises(ValueError, match="training would never start"):
        Cell(stage)


def test_memory_is_checked_before_it_is_taken():
    stage = acted("terminating", steps=1, replay={"memory_bytes": 20_000})
    with pytest.raises(MemoryError, match="largest capacity that fits"):
        Cell(stage)


@pytest.mark.parametrize("kind", ["terminating", "truncating", "scripted", "stacked"])
def test_sequences_that_do_not_cross_episodes_hold_every_transition_of_one_episode(kind):
    stage = acted(kind, cross_episodes=False)
    views = stage.views()
    real = ~views["final"][:, :-1]
    for index in range(len(stage.unrolls)):
        # Every transition is of the episode of row 0: a later start is row T or a filled row.
        rows = np.flatnonzero(real[index])
        assert not views["start"][index][rows[rows > 0]].any()
    for env_id, expected in enumerate(stage.expected):
        found = [
            (views["reward"][index][t + 1], bool(views["terminated"][index][t + 1]))
            for index in np.flatnonzero(views["env_id"] == env_id)
            for t in np.flatnonzero(real[index])
        ]
        wanted = [
            (after["reward"], after["terminated"])
            for row, after in pairwise(expected.rows)
            if not row["final"]
        ]
        assert found == wanted[: len(found)]
        assert len(found) > 20
    cell, net = Cell(stage), network(stage)
    cell.buffer._credit = -1e9
    cell.send(stage.unrolls)
    for _ in range(30):
        sample = cell.buffer.shard.sample(BATCH, cell.buffer._rng)
        cell.buffer._drawn, cell.buffer._drawn_mass = sample, 1.0
        batch = cell.buffer.take(any_outcome(cell.buffer)).batch
        inputs = NetInputs(batch.observation, batch.reward, batch.previous_action, batch.start)
        with torch.no_grad():
            q, _ = net(inputs, batch.core_state)
        for column, unroll in enumerate(sample.generations):
            kept = torch.from_numpy(np.append(real[unroll], True))
            recorded = torch.from_numpy(views["behaviour:q_greedy"][unroll])
            error = (q[BURN_IN:, column].max(-1).values - recorded).abs()[kept]
            assert error.max() < 1e-5
