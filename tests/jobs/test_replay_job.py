"""Whole jobs of `layout: replay`, all ranks in one process."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcrl.acting.policy import ActingPolicy, Policy
from hpcrl.config.load import ConfigError
from hpcrl.exit_codes import DONE, USAGE
from hpcrl.learning.optim import Optimizer
from hpcrl.learning.replay_buffer import ReplayBuffer
from hpcrl.run.checkpoint import load_latest
from hpcrl.run.metrics import read_metrics
from hpcrl.start.training import read_training_config
from tests.jobs.test_roles_loopback import job_config, world_size
from tests.loopback_job import JobRun, left_over

AGENTS = {
    "r2d2": {"name": "r2d2", "burn_in_steps": 3, "num_steps": 2, "head_size": 8},
    "apex": {"name": "apex", "num_steps": 3, "head_size": 8},
}
BATCH = 8


def replay_config(tmp_path, kind="r2d2", ratio=0.75, **options):
    sections = {
        "agent": {**AGENTS[kind], "target_update_steps": 5, "evaluation_envs": 2},
        "network": {"core": "lstm" if kind == "r2d2" else "none", "core_size": 4},
        "learner": {"batch_unrolls": BATCH, "unroll_steps": 5, "backend": "mpi"},
        "replay": {"capacity_unrolls": 400, "min_size_unrolls": 20, "ratio": ratio},
        **options,
    }
    return replace(job_config(tmp_path, **sections), layout="replay")


def run_job(monkeypatch, config, size=None):
    buffers = []
    make = ReplayBuffer.__init__

    def noted(self, *arguments):
        make(self, *arguments)
        buffers.append(self)

    monkeypatch.setattr(ReplayBuffer, "__init__", noted)
    return JobRun(monkeypatch).start(config, size or world_size(config)), buffers


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("agent", AGENTS)
def test_counters_ratio_and_shards_are_as_configured(tmp_path, monkeypatch, agent, learners):
    config = replay_config(tmp_path, agent, learners=learners, stop={"agent_steps": 2000})
    run, buffers = run_job(monkeypatch, config)
    assert run.codes == [DONE] * world_size(config)
    assert left_over(run.world, "steps", "unrolls") == []
    with open(f"{config.run.dir}/STATUS.json") as file:
        counters = json.load(file)["counters"]
    share = BATCH // learners
    assert len(buffers) == learners
    stored = sum(b.shard.counters.inserted_unrolls for b in buffers)
    # Episodes terminate, so every transition is real; what came after the last vote isn't counted.
    assert 2000 <= counters["agent_steps"] <= 5 * stored
    for buffer in buffers:
        shard = buffer.shard
        assert shard.counters.sampled_items - share <= counters["learner_steps"] * share
        earned = buffer._earning_unrolls * 0.75 * shard.layout.items_per_unroll
        assert earned - 2 * share - 5 <= shard.counters.sampled_items <= earned
        ok, why = shard.check_valid()
        assert ok, why
        # Two of the job's 12 environments only measure.
        assert max(u.stream_id for u in shard.unrolls()) < 10
    record = read_metrics(Path(config.run.dir))[-2]
    shares = [record.get(f"replay_shard_{i}_share") for i in range(2)]
    assert shares == ([None] * 2 if learners == 1 else [0.5] * 2)
    assert record["replay_ratio"] == pytest.approx(0.75, rel=0.25)
    assert record["replay_least_shard_share"] == record["replay_most_shard_share"] == 1 / learners
    names = ("replay_age_unrolls", "priority_mean", "priority_max", "priority_age_draws", "weight")
    assert all(record[name] > 0 for name in names)
    assert record["exploring_mean_return_100"] > 0
    assert record["mean_return_100"] > 0


def local_config(tmp_path, kind, learners, workers=3, **options):
    config = replay_config(tmp_path, kind, learners=learners, actors=workers, **options)
    topology = replace(config.topology, inference="auto")
    return replace(config, placement="local", topology=topology)


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("agent", AGENTS)
def test_workers_feed_a_replay_and_measure_as_inference_ranks_do(
    tmp_path, monkeypatch, agent, learners
):
    """The third worker's four environments all measure: it completes no unroll, and learns on."""
    loaded = []
    load = Policy.load

    def noted(self, parameters, version):
        if self.evaluation.all():
            loaded.append(version)
        load(self, parameters, version)

    monkeypatch.setattr(ActingPolicy, "load", noted, raising=False)
    config = local_config(
        *(tmp_path, agent, learners),
        agent={**AGENTS[agent], "target_update_steps": 5, "evaluation_envs": 4},
        stop={"agent_steps": 3000},
    )
    if learners == 2:  # or its learner would starve
        config = replace(config, topology=replace(config.topology, actors=5))
    run, buffers = run_job(monkeypatch, config, learners + config.topology.actors)
    assert set(run.codes) == {DONE}
    assert left_over(run.world, "unrolls", "control") == []
    training = (config.topology.actors - 1) * 4
    streams = {u.stream_id for b in buffers for u in b.shard.unrolls()}
    assert streams == set(range(training))
    assert len(set(loaded)) > 1
    for buffer in buffers:
        ok, why = buffer.shard.check_valid()
        assert ok, why
    record = read_metrics(Path(config.run.dir))[-1]
    assert record["replay_ratio"] == pytest.approx(0.75, rel=0.25)
    assert record["exploring_mean_return_100"] > 0
    assert record["mean_return_100"] > 0


@pytest.mark.parametrize("agent", AGENTS)
def test_frozen_weights_give_workers_and_inference_ranks_the_same_unrolls_and_priorities(
    tmp_path, monkeypatch, agent
):
    monkeypatch.setattr(Optimizer, "step", lambda self, agent_steps: 0.0)
    store = ReplayBuffer._store
    stored: dict[str, list] = {}

    def noted(self, views):
        stored[self._job.config.placement].append({n: v.copy() for n, v in views.items()})
        store(self, views)

    monkeypatch.setattr(ReplayBuffer, "_store", noted)
    options = {"observation_shape": (2,), "observation_dtype": "float32", "truncate": True}
    for placement in ("central", "local"):
        stored[placement] = []
        config = replay_config(
            tmp_path / placement,
            agent,
            inference=1,
            actors=1,
            agent={**AGENTS[agent], "target_update_steps": 5},
            env={"envs_per_actor": 1, "groups": 1, "options": options},
            stop={"agent_steps": 300},
        )
        size = 3
        if placement == "local":
            topology, size = replace(config.topology, inference="auto"), 2
            config = replace(config, topology=topology)
        run, _ = run_job(monkeypatch, replace(config, placement=placement), size)
        assert set(run.codes) == {DONE}
    count = min(map(len, stored.values()))
    assert count >= 60
    for ours, theirs in zip(stored["central"][:count], stored["local"][:count], strict=True):
        assert ours.keys() == theirs.keys() >= {"priority", "core_state", "action"}
        for name in ours.keys() - {"policy_version"}:  # how far learning is when it is sampled
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    # A recurrent state and priorities that are not all alike.
    priorities = np.stack([unroll["priority"] for unroll in stored["local"]])
    assert len(np.unique(priorities)) > 10
    if agent == "r2d2":
        assert np.stack([unroll["core_state"] for unroll in stored["local"]]).any()


@pytest.mark.parametrize("ratio", [0.3, 0.75, 7.3])
def test_learners_with_unequal_cells_and_the_smallest_capacity_go_on(tmp_path, monkeypatch, ratio):
    """Four learners; the first feeds on two actors, the last on one whose half only measures."""
    replay = {"capacity_unrolls": 4 * (8 + 5 + 2), "min_size_unrolls": 20, "ratio": ratio}
    config = replay_config(
        tmp_path, learners=4, inference=4, actors=5, replay=replay, stop={"agent_steps": 1500}
    )
    run, buffers = run_job(monkeypatch, config)
    assert run.codes == [DONE] * world_size(config)
    assert len({b.shard.num_unrolls for b in buffers}) == 1  # all are full
    record = read_metrics(Path(config.run.dir))[-1]
    assert sum(record[f"replay_shard_{i}_share"] for i in range(4)) == pytest.approx(1.0)
    assert all(record[f"replay_shard_{i}_age_unrolls"] > 0 for i in range(4))
    assert 0 < record["weight_smallest"] <= 1
    assert 0 <= record["replay_acting_held"] <= 1
    for buffer in buffers:
        earned = buffer._earning_unrolls * ratio
        assert earned - 2 * 2 - ratio <= buffer.shard.counters.sampled_items <= earned


def test_the_target_network_follows_every_few_steps_and_is_checkpointed(tmp_path, monkeypatch):
    config = replay_config(tmp_path, stop={"agent_steps": 800})
    run, _ = run_job(monkeypatch, config)
    assert run.codes[0] == DONE
    saved = load_latest(Path(config.run.dir))
    names = [name for name in saved.tensors if name.startswith("model.")]
    differs = [
        not np.array_equal(saved.tensors[n], saved.tensors[n.replace("model.", "target.", 1)])
        for n in names
    ]
    # The last step is not one of those before which the copy is made, so it is ahead.
    assert any(differs)


def test_a_resumed_run_fills_its_replay_again_before_it_trains(tmp_path, monkeypatch):
    first = replay_config(tmp_path, stop={"agent_steps": 800})
    run_job(monkeypatch, first)
    steps = load_latest(Path(first.run.dir)).state["counters"]
    second = replay_config(tmp_path, learners=2, stop={"agent_steps": 1600})
    run, buffers = run_job(monkeypatch, second)
    assert run.codes == [DONE] * world_size(second)
    after = load_latest(Path(first.run.dir)).state["counters"]
    assert after["agent_steps"] >= 1600
    assert after["learner_steps"] > steps["learner_steps"]
    assert all(b.shard.counters.inserted_unrolls >= 10 for b in buffers[-2:])


@pytest.mark.parametrize("learners", [(2, 1), (1, 2), (2, 2)])
def test_saved_shards_are_spread_over_the_learners_of_the_next_start(
    tmp_path, monkeypatch, capsys, learners
):
    checkpoint = {"replay": "shared"}
    before, after = learners
    first = replay_config(
        tmp_path, learners=before, stop={"agent_steps": 800}, checkpoint=checkpoint
    )
    _, saved = run_job(monkeypatch, first)
    stored = sorted((u.stream_id, u.unroll_index) for b in saved for u in b.shard.unrolls())
    restored = []
    fill = ReplayBuffer.restore

    def noted(self, saved):
        fill(self, saved)
        restored.append([(u.stream_id, u.unroll_index) for u in self.shard.unrolls()])
        assert self._filled

    monkeypatch.setattr(ReplayBuffer, "restore", noted)
    second = replay_config(
        tmp_path, learners=after, stop={"agent_steps": 1000}, checkpoint=checkpoint
    )
    run, _ = run_job(monkeypatch, second)
    assert run.codes == [DONE] * world_size(second)
    assert len(restored) == after
    assert sorted(unroll for part in restored for unroll in part) == stored
    # The files of the checkpoint before are gone.
    assert len(list((tmp_path / "run" / "replay").iterdir())) == 2
    said = capsys.readouterr().out
    if before == after:
        assert said.count("from its own of 2 replay shards") == 2
    else:
        assert said.count(f"from {before} replay shards") == after


def test_a_damaged_shard_costs_that_shard_only(tmp_path, monkeypatch, capsys):
    options = {"learners": 2, "checkpoint": {"replay": "shared"}}
    run_job(monkeypatch, replay_config(tmp_path, stop={"agent_steps": 800}, **options))
    (path,) = (tmp_path / "run" / "replay").glob("step-*/shard-0.replay")
    path.write_bytes(path.read_bytes()[:5000])
    config = replay_config(tmp_path, stop={"agent_steps": 1000}, **options)
    run, _ = run_job(monkeypatch, config)
    assert run.codes == [DONE] * world_size(config)
    out = capsys.readouterr().out
    assert "shard-0.replay: the file is cut at unroll" in out


def test_a_replay_that_does_not_fit_ends_every_rank_with_one_message(tmp_path, monkeypatch, capsys):
    replay = {"capacity_unrolls": 400, "min_size_unrolls": 20, "memory_bytes": 10_000}
    run, _ = run_job(monkeypatch, replay_config(tmp_path, learners=2, replay=replay))
    assert run.codes == [USAGE] * 7
    error = capsys.readouterr().err
    assert "a replay shard of 200 unrolls needs" in error
    assert "the largest capacity that fits is" in error


def test_an_agent_in_a_layout_that_is_not_its_own_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("{stop: {agent_steps: 1}, agent: {name: r2d2}}")
    with pytest.raises(ConfigError, match="r2d2 learns in layout: replay, got layout: seed"):
        read_training_config(str(path), [])
    path.write_text("{stop: {agent_steps: 1}, layout: replay}")
    with pytest.raises(ConfigError, match="vtrace learns in layout: seed"):
        read_training_config(str(path), [])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"agent": {**AGENTS["r2d2"], "burn_in_steps": 5}}, "must be less than learner.unroll_st"),
        ({"env": {"options": {"action_size": 2}}}, "need one discrete choice"),
        ({"replay": {"capacity_unrolls": 30, "min_size_unrolls": 29}}, "would never start"),
        ({"agent": AGENTS["apex"]}, "network.core lstm: agent apex"),
        ({"agent": {**AGENTS["r2d2"], "evaluation_envs": 12}}, "leaves 0 of 12 environments"),
        # The third actor alone feeds the second learner, and all of its environments measure.
        (
            {"agent": {**AGENTS["r2d2"], "evaluation_envs": 8}, "learners": 2},
            "leaves 4 of 12 environments for training, and none for learner 1",
        ),
    ],
)
def test_what_can_not_work_is_refused_before_the_first_step(
    tmp_path, monkeypatch, capsys, sections, message
):
    run, _ = run_job(monkeypatch, replay_config(tmp_path, **sections))
    assert set(run.codes) == {USAGE}
    assert message in capsys.readouterr().err
