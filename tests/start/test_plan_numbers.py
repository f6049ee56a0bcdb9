import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.comm.wire import unroll_layout
from hpcrl.config.load import parse_config
from hpcrl.job import credit_unrolls, full_batch_rows, queue_slots_per_source
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from hpcrl.start.demand import demand_of
from hpcrl.start.plan_numbers import derived_numbers, plan_lines
from hpcrl.topology import plan_topology, uniform_node_map

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SECTIONS: dict[str, dict] = {
    "env": {"name": "synthetic:counting", "envs_per_actor": 16, "groups": 2},
    "topology": {"learners": 2, "inference": 4, "actors": 10},
    "learner": {"batch_unrolls": 24, "unroll_steps": 20},
    "stop": {"frames": 10_000, "agent_steps": 1_000_000},
}
SPEC = EnvSpec(
    "test:Frames",
    {"obs": ObservationLeaf(ArraySpec((8, 8), "uint8"), stack=4)},
    ActionSpec((ActionPart("discrete", (3,)),)),
    frame_skip=4,
)


def planned(**sections):
    config = parse_config({**SECTIONS, **sections})
    return config, plan_topology(config.topology, uniform_node_map(1, 16))


def test_every_number_follows_by_arithmetic():
    config, topology = planned()
    unroll = unroll_layout(SPEC, {}, 20, 0)
    # Three ids, three flags and one prefix of 3 frames; 21 rows of reward, actions, version, frame.
    assert unroll.nbytes == 3 * 64 + 3 * 64 + 3 * 64 + 128 + 2 * 128 + 192 + 21 * 64
    # 10 actors on 4 inference ranks: at most 3, so 48 rows. A learner takes 12 of 24 unrolls from
    # 2 sources, 6 in flight from each. Its 80 environments complete more than fit into three times
    # 12 at once, which is the most.
    assert derived_numbers(config, topology, SPEC, unroll) == [
        "environments: 10 acting ranks x 16 = 160, stepped in 2 groups of 8",
        "a learner step: 24 unrolls x 20 = 480 agent steps = 1,920 frames; each learner takes 12 "
        "unrolls",
        "an inference batch: dispatched at 24 of 48 rows, or after 2 ms",
        "unrolls: up to 36 (89.9 kB) in the queue of a learner and 6 (15 kB) in flight from each "
        "of its sources; one takes 2.5 kB",
        "the end: 1,000,000 agent steps are 2,084 learner steps",
        "the end: 10,000 frames are 6 learner steps",
    ]


@pytest.mark.parametrize(
    ("envs_per_actor", "batch_unrolls", "queue"),
    [
        (16, 24, 36),  # 80 environments of each learner, 12 in flight: 68 is over three times 12
        (16, 56, 56),  # 80 less 28 in flight are 52: twice 28
        (16, 48, 56),  # 80 less 24 are 56, between twice and three times 24
    ],
)
def test_a_queue_has_room_for_unrolls_that_are_complete_at_once(
    envs_per_actor, batch_unrolls, queue
):
    config, topology = planned(
        env={**SECTIONS["env"], "envs_per_actor": envs_per_actor},
        learner={**SECTIONS["learner"], "batch_unrolls": batch_unrolls},
    )
    assert 2 * queue_slots_per_source(config, topology, 2) == queue


def test_a_replay_step_stores_the_batch_divided_by_the_ratio():
    replay = {"ratio": 0.75, "capacity_unrolls": 1001}
    config, topology = planned(layout="replay", agent={"name": "r2d2"}, replay=replay)
    # 24 sequences of 20 steps, each of which pays for 0.75: 32 unrolls are stored.
    assert derived_numbers(config, topology, SPEC)[1] == (
        "a learner step: 24 sampled items, 12 of each learner, for every 640 agent steps = 2,560 "
        "frames stored (ratio 0.75); each of 2 learners stores 500 unrolls"
    )
    config, topology = planned(layout="replay", agent={"name": "apex"}, replay=replay)
    # 24 transitions are 32 steps stored.
    assert "for every 32 agent steps" in derived_numbers(config, topology, SPEC)[1]
    assert "1,000,000 agent steps are 31,250 learner steps" in "\n".join(
        derived_numbers(config, topology)
    )


def test_a_gradient_is_one_workers_own():
    sections = {"layout": "async_gradient", "agent": {"name": "a3c"}}
    config = parse_config({**SECTIONS, "topology": {"learners": 2, "actors": 14}, **sections})
    topology = plan_topology(config.topology, uniform_node_map(1, 16), demand_of(config))
    lines = derived_numbers(config, topology, SPEC, unroll_layout(SPEC, {}, 20, 0))
    assert lines[1] == (
        "a gradient of a worker: 24 unrolls x 20 = 480 agent steps = 1,920 frames, sent in 2 "
        "shards; dropped where it is more than 56 versions behind"
    )
    assert not any("queue" in line for line in lines)


def test_without_the_environment_frames_and_bytes_are_left_out():
    text = "\n".join(derived_numbers(*planned()))
    assert "480 agent steps; each" in text
    assert "up to 36 in the queue of a learner and 6 in flight" in text
    assert "frames" not in text
    assert "B)" not in text


def test_configured_sizes_go_before_the_derived_ones():
    config, topology = planned(
        learner={"batch_unrolls": 24, "queue_unrolls": 15},
        inference={"credits_unrolls": 3, "max_batch_rows": 7, "max_wait_s": 0.01},
    )
    assert queue_slots_per_source(config, topology, 2) == 8  # 15 / 2, rounded up
    assert credit_unrolls(config, topology, 2) == 3
    assert full_batch_rows(config, 48) == 7
    text = "\n".join(derived_numbers(config, topology))
    assert "at 7 of 48 rows, or after 10 ms" in text
    assert "up to 16 in the queue of a learner and 3 in flight" in text


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_full_batch_has_at_least_one_row(rows):
    assert full_batch_rows(parse_config({}), rows) == max(1, rows // 2)


def test_a_plan_learns_the_spaces_from_an_environment_and_does_without_if_there_is_none():
    config, topology = planned()
    # Counting: 3 float32 observed, no frame skip.
    lines = plan_lines(config, topology)
    assert "480 agent steps = 480 frames" in lines[1]
    assert "one takes" in lines[3]
    config, topology = planned(env={"name": "synthetic:absent", "envs_per_actor": 16})
    lines = plan_lines(config, topology)
    assert lines[:-1] == derived_numbers(config, topology)
    assert lines[-1].startswith("frames and bytes are left out, synthetic:absent can't be made")


def test_the_plan_command_prints_them_without_mpi():
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from hpcrl.cli import main\n"
        f"main(['plan', {str(CONFIGS / 'cartpole_vtrace.yaml')!r}])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "a learner step: " in done.stdout


def test_evaluators_are_in_the_numbers_where_there_are_any():
    topology = {**SECTIONS["topology"], "actors": 9, "evaluators": 1}
    config, planned_topology = planned(topology=topology, evaluation={"every_s": 0.5})
    lines = derived_numbers(config, planned_topology)
    assert (
        "evaluation: rounds of 10 greedy episodes on 1 ranks, every 0.5 s at most, each episode up "
        "to 27,000 agent steps" in lines
    )
    assert not any("evaluation" in line for line in derived_numbers(*planned()))


@pytest.mark.parametrize(
    ("stale", "kept"),
    [("drop", "older unrolls are dropped"), ("wait", "acting waits for newer weights")],
)
def test_a_bound_on_the_lag_is_in_the_numbers_where_there_is_one(stale, kept):
    lines = derived_numbers(*planned(learner={"max_policy_lag": 9, "stale_unrolls": stale}))
    assert f"policy lag: at most 9 learner steps when it is trained on; {kept}" in lines
    assert not any("policy lag" in line for line in derived_numbers(*planned()))


def test_an_environment_of_several_agents_is_looked_at_as_a_group_of_rows():
    env = {
        "name": "pettingzoo:simple_spread_v3",
        "options": {"kwargs": {"N": 2}},
        "envs_per_actor": 8,
        "groups": 2,
    }
    config, topology = planned(env=env)
    assert not any("left out" in line for line in plan_lines(config, topology))
    config, topology = planned(env={**env, "envs_per_actor": 6})
    lines = plan_lines(config, topology)
    assert any("has 2 agents, each a row of the batch" in line for line in lines)
