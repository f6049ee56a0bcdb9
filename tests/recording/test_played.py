"""What is recorded is what was played."""

import numpy as np
import pytest

from analysis.reader import Run
from env_wrappers import make
from hpcrl.acting.policy import ActingPolicy
from hpcrl.comm.wire import row_fields, unroll_layout
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from tests.acting_tools import CPU, KINDS, Stage, weights
from tests.recording.recorded import by_identity, played_episodes, recorded_stage
from tests.recording_tools import assert_same_episode, naive_episodes, recorder_for
from tests.small import brain_of, rows_of


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_on_disk_are_those_of_a_naive_recorder(tmp_path, kind):
    stage, recorder = recorded_stage(tmp_path / "trajectories" / "inference-0-0", kind)
    recorded = by_identity(Run(tmp_path))
    expected = played_episodes(stage)
    assert len(expected) > 10
    assert recorded.keys() == expected.keys()
    for identity, (steps, entry) in recorded.items():
        assert_same_episode(steps, entry, expected[identity])
        assert entry["env_seed"] == 100 + identity[0]
        assert entry["return"] == steps["reward"].astype(np.float64).sum()
    assert recorder.recorded == len(expected)
    assert recorder.dropped == 0


def test_flags_that_travel_as_bits_are_recorded_one_byte_each(tmp_path):
    leaf = ObservationLeaf(ArraySpec((2,), "uint8"), "binary", bits=(3, 5))
    spec = EnvSpec("x:y", {"planes": leaf}, ActionSpec((ActionPart("discrete", nvec=(2,)),)))
    recorder = recorder_for(tmp_path / "trajectories" / "inference-0-0", spec, {}, 1)
    flags = np.random.default_rng(0).integers(0, 2, (4, 3, 5))
    for step, planes in enumerate(flags):
        rows = {
            name: np.zeros((1, *array.shape), array.dtype)
            for name, array in row_fields(spec, {}).items()
        }
        rows["obs:planes"] = np.packbits(planes.reshape(1, 15), axis=-1)
        rows["start"][:], rows["final"][:] = step == 0, step == 3
        recorder.add(np.array([0]), rows)
    recorder.close()
    run = Run(tmp_path)
    steps = run.episode(0)
    np.testing.assert_array_equal(steps["observation/planes"], flags[:3])
    np.testing.assert_array_equal(steps["final/planes"], flags[3])
    assert run.image_leaf() is None
    assert run.segments[0].env["observation"]["planes"]["array"]["shape"] == [3, 5]


def test_a_restarted_environment_leaves_an_interrupted_episode(tmp_path):
    stage = Stage("truncating")
    folder = tmp_path / "trajectories" / "inference-0-0"
    recorder = recorder_for(folder, stage.spec, stage.brain.behaviour, 3)
    stage.policy.sink = recorder
    for _ in range(2):
        stage.step([0, 1, 2])
    before = naive_episodes(stage.expected[1].rows)
    stage.restart(1)
    for _ in range(10):
        stage.step([0, 1, 2])
    recorder.close()
    recorded = by_identity(Run(tmp_path))
    assert [episode["ending"] for episode in before] == ["interrupted"]
    steps, entry = recorded[1, 0]
    assert_same_episode(steps, entry, before[0])
    for number, episode in enumerate(naive_episodes(stage.expected[1].rows)):
        steps, entry = recorded[1, number + 1]
        assert_same_episode(steps, entry, episode)


def test_atari_frames_and_rewards_are_replayed_from_recorded_actions_and_seeds(tmp_path):
    options = {"repeat_action_probability": 0.0, "life_loss": True, "noop_max": 30}
    seeds = [7, 8]
    envs = make("atari:Breakout", 2, seeds, options)
    spec = EnvSpec.from_json(envs.spec)
    brain = brain_of(spec, network={"hidden_sizes": [8], "torso": "nature_cnn"})
    stage_policy = acting_policy(brain, spec)
    folder = tmp_path / "trajectories" / "inference-0-0"
    recorder = recorder_for(folder, spec, brain.behaviour, 2)
    stage_policy.sink = recorder
    batch = envs.reset()
    for _ in range(250):
        actions = stage_policy.act(rows_of(batch, [0, 1]))
        stage_policy.record()
        batch = envs.step(actions)
    recorder.close()
    envs.close()
    run = Run(tmp_path)
    table = run.episodes()
    assert table["complete"].sum() >= 4
    for env_id, seed in enumerate(seeds):
        again = make("atari:Breakout", 1, [seed], options)
        batch = again.reset()
        for row in table.index[table["env_id"] == env_id]:
            steps = run.episode(int(row))
            for t, action in enumerate(steps["action"]):
                np.testing.assert_array_equal(
                    steps["observation/obs"][t], batch.observation["obs"][0]
                )
                batch = again.step(action[None])
                assert batch.reward[0] == steps["reward"][t]
                assert batch.terminated[0] == steps["terminated"][t]
        again.close()


def acting_policy(brain, spec):

    layout = unroll_layout(spec, brain.behaviour, 4, 0)
    policy = ActingPolicy(brain, spec, layout, 4, np.arange(2), CPU, "float32", seed=1)
    policy.load(weights(brain, 3), 0)
    return policy
