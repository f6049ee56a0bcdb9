"""Exports hold what was recorded, exactly, as the formats' own readers see it."""

import json

import gymnasium
import h5py
import numpy as np
import pytest
from minari import MinariDataset

from analysis.errors import DataError
from analysis.export import export, main
from analysis.reader import Run
from analysis.segments import leaf_datasets
from analysis.spaces import registered_spec
from analysis.video import main as video
from hpcrl.recording import SegmentWriter
from hpcrl.recording.episodes import column_specs
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from tests.recording_tools import IMAGES, VECTOR, append_episode, write_run


def observations(run, row):
    """`[T+1, ...]`; a terminated episode's last observation is repeated."""
    steps = run.episode(row)
    values = steps["observation/obs"]
    return np.concatenate([values, steps.get("final/obs", values[-1])[None]])


@pytest.mark.parametrize("env", [VECTOR, IMAGES], ids=["vector", "images"])
def test_minari_reads_back_every_episode_without_loss(tmp_path, env):
    run = Run(write_run(tmp_path, env=env))
    assert export(run, "minari", tmp_path / "set") == 40
    dataset = MinariDataset(tmp_path / "set" / "data")
    assert (dataset.total_episodes, dataset.total_steps) == (40, 200)
    for row, episode in enumerate(dataset.iterate_episodes()):
        steps = run.episode(row)
        np.testing.assert_array_equal(episode.observations, observations(run, row))
        np.testing.assert_array_equal(episode.actions, steps["action"][:, 0])
        np.testing.assert_array_equal(episode.rewards, steps["reward"])
        np.testing.assert_array_equal(episode.terminations, steps["terminated"])
        np.testing.assert_array_equal(episode.truncations, steps["truncated"])
        np.testing.assert_array_equal(episode.infos["log_prob"], steps["behaviour/log_prob"])
        assert dataset.observation_space.contains(episode.observations[0])
        assert dataset.action_space.contains(episode.actions[0])
    assert len(dataset.sample_episodes(5)) == 5


def test_minari_recovers_a_registered_environment(tmp_path):
    path = write_run(tmp_path)
    text = (path / "config.yaml").read_text().replace("synthetic:counting", "gym:CartPole-v1")
    (path / "config.yaml").write_text(text)
    export(Run(path), "minari", tmp_path / "set")
    env = MinariDataset(tmp_path / "set" / "data").recover_environment()
    assert env.spec.id == "CartPole-v1"


def test_robomimic_makes_a_registered_environment_by_its_own_name(tmp_path):
    path = write_run(tmp_path)
    (path / "config.yaml").write_text(
        "env: {name: 'gym:CartPole-v1', options: {kwargs: {sutton_barto_reward: true}}}"
    )
    export(Run(path), "robomimic", tmp_path / "set")
    with h5py.File(tmp_path / "set") as file:
        made = json.loads(file["data"].attrs["env_args"])
    assert gymnasium.make(made["env_name"], **made["env_kwargs"]).spec.id == "CartPole-v1"
    assert made["type"] == 2


def test_d4rl_is_flat_and_marks_each_end_once(tmp_path):
    run = Run(write_run(tmp_path, env=IMAGES))
    export(run, "d4rl", tmp_path / "set.hdf5")
    with h5py.File(tmp_path / "set.hdf5") as file:
        rows = [observations(run, row) for row in range(40)]
        np.testing.assert_array_equal(
            file["observations"][:], np.concatenate([frames[:-1] for frames in rows])
        )
        np.testing.assert_array_equal(
            file["next_observations"][:], np.concatenate([frames[1:] for frames in rows])
        )
        ends = np.cumsum([3 + k % 5 for k in range(40)]) - 1
        assert np.flatnonzero(file["terminals"][:]).tolist() == ends[::2].tolist()
        assert np.flatnonzero(file["timeouts"][:]).tolist() == ends[1::2].tolist()
        assert file["metadata"].attrs["env_name"] == "synthetic:counting"
        # d4rl.sequence_dataset takes row i of every data set.
        lengths = {len(data) for data in leaf_datasets(file).values()}
        assert lengths == {200}


def test_robomimic_groups_and_masks(tmp_path):
    run = Run(write_run(tmp_path))
    export(run, "robomimic", tmp_path / "set.hdf5")
    with h5py.File(tmp_path / "set.hdf5") as file:
        assert file["data"].attrs["total"] == 200
        train, valid = (set(file[f"mask/{name}"][:].tolist()) for name in ("train", "valid"))
        assert train | valid == {f"demo_{k}".encode() for k in range(40)}
        assert (len(train & valid), len(valid)) == (0, 4)
        for k in (0, 39):
            demo = file[f"data/demo_{k}"]
            assert demo.attrs["num_samples"] == 3 + k % 5
            np.testing.assert_array_equal(demo["obs/obs"][:], observations(run, k)[:-1])
            np.testing.assert_array_equal(demo["next_obs/obs"][:], observations(run, k)[1:])
            assert demo["dones"][:].tolist() == [0] * (2 + k % 5) + [1]


@pytest.mark.parametrize("kind", ["minari", "d4rl", "robomimic"])
def test_an_export_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch, kind):
    run = Run(write_run(tmp_path))
    whole = run.episode

    def damaged(number, *columns):
        if number == 20:
            raise DataError("damaged here")
        return whole(number, *columns)

    monkeypatch.setattr(run, "episode", damaged)
    with pytest.raises(DataError, match="damaged here"):
        export(run, kind, tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["minari", "d4rl", "robomimic"])
def test_episodes_of_evaluation_are_not_exported(tmp_path, kind):
    path = write_run(tmp_path)
    with h5py.File(path / "trajectories/inference-0-0/seg-00001.h5", "r+") as file:
        file["episodes/evaluation"][:] = True
    assert export(Run(path), kind, tmp_path / "set") == 20
    if kind == "minari":
        assert MinariDataset(tmp_path / "set" / "data").total_episodes == 20
        return
    with h5py.File(tmp_path / "set") as file:
        rewards = file["rewards"] if kind == "d4rl" else file["data"]
        assert len(rewards) == (100 if kind == "d4rl" else 20)


def test_what_a_killed_export_left_is_not_written_over(tmp_path):
    run = Run(write_run(tmp_path))
    left = tmp_path / "set.part"
    left.write_bytes(b"half")
    with pytest.raises(DataError, match="left from an export that was killed: remove it first"):
        export(run, "d4rl", tmp_path / "set")
    assert left.read_bytes() == b"half"


@pytest.mark.parametrize("kind", ["minari", "d4rl", "robomimic"])
def test_the_end_of_an_interrupted_episode_is_an_end_but_no_termination(tmp_path, kind):
    path = write_run(tmp_path, segments=1)
    with h5py.File(path / "trajectories/inference-0-0/seg-00000.h5", "r+") as file:
        assert file["steps/truncated"][-1]
        file["steps/truncated"][-1] = False
        file["episodes/truncated"][-1] = file["episodes/complete"][-1] = False
    export(Run(path), kind, tmp_path / "set")
    if kind == "minari":
        *_, last = MinariDataset(tmp_path / "set" / "data").iterate_episodes()
        ends = last.truncations
        assert not last.terminations.any()
    else:
        with h5py.File(tmp_path / "set") as file:
            ends = file["timeouts" if kind == "d4rl" else "data/demo_39/dones"][-7:]
            assert kind == "robomimic" or not file["terminals"][-7:].any()
    assert ends.tolist() == [0] * 6 + [1]


ONE_LEAF = {"obs": ObservationLeaf(ArraySpec((5,), "float32"))}
NESTED = {
    "arm/joints": ObservationLeaf(ArraySpec((3,), "float64")),
    "arm/grip": ObservationLeaf(ArraySpec((2,), "uint8"), "binary"),
    "camera": ObservationLeaf(ArraySpec((6, 8, 3), "uint8")),
    "goal": ObservationLeaf(ArraySpec((), "int64"), "discrete", nvec=(300,)),
}
SEVERAL = ActionSpec((ActionPart("discrete", nvec=(3, 5)), ActionPart("discrete", nvec=(4,))))
FORCES = ActionSpec((ActionPart("box", low=(-1.0, 0.0), high=(1.0, 2.0)),))
MIXED = ActionSpec((*FORCES.parts, ActionPart("discrete", nvec=(3,))))


def recorded(tmp_path, observation, action):
    """A run of 40 episodes with these spaces."""
    path = write_run(tmp_path, segments=1)
    segment = path / "trajectories/inference-0-0/seg-00000.h5"
    spec = EnvSpec("synthetic:counting", observation, action)
    with h5py.File(segment) as file:
        attributes = {
            name: file.attrs[name]
            for name in ("env_name", "config", "config_hash", "seed", "code_version", "fraction")
        }
    segment.unlink()
    columns = column_specs(spec, {}, ("observation",))
    described = {**attributes, "env": json.dumps(spec.to_json())}
    writer = SegmentWriter(segment, columns, described, "gzip-1")
    for episode in range(40):
        append_episode(writer, columns, episode)
    writer.close("finished", {})
    return Run(path)


def seen(episode, leaf):
    """`[T+1, ...]` of what `append_episode` gives a leaf: episode + step, and 200 at the end."""
    length = 3 + episode % 5
    values = [episode + step for step in range(length)]
    values.append(200 if episode % 2 else values[-1])
    column = np.array(values).reshape(-1, *[1] * len(leaf.array.shape))
    return np.broadcast_to(column, (length + 1, *leaf.array.shape)).astype(leaf.array.dtype)


def chosen(episode, action):
    """`[T, A]`: step modulo 3 in every component."""
    step = np.arange(3 + episode % 5) % 3
    return np.repeat(step[:, None], action.size, axis=1).astype(action.dtype)


@pytest.mark.parametrize("action", [SEVERAL, FORCES, MIXED], ids=["several", "forces", "mixed"])
@pytest.mark.parametrize("observation", [ONE_LEAF, NESTED], ids=["leaf", "nested"])
def test_minari_has_the_spaces_of_the_environment(tmp_path, observation, action):
    export(recorded(tmp_path, observation, action), "minari", tmp_path / "set")
    dataset = MinariDataset(tmp_path / "set" / "data")
    spaces = gymnasium.spaces
    if action is SEVERAL:
        assert dataset.action_space == spaces.MultiDiscrete([3, 5, 4], np.int32)
    elif action is FORCES:
        assert dataset.action_space == spaces.Box(np.float32([-1, 0]), np.float32([1, 2]))
    else:
        assert dataset.action_space == spaces.Box(np.float32([-1, 0, 0]), np.float32([1, 2, 2]))
    if observation is NESTED:
        assert set(dataset.observation_space) == {"arm", "camera", "goal"}
        assert dataset.observation_space["goal"] == spaces.Discrete(300)
        assert dataset.observation_space["camera"] == spaces.Box(0, 255, (6, 8, 3), np.uint8)
        assert dataset.observation_space["arm"]["grip"] == spaces.Box(0, 1, (2,), np.uint8)
    for number, episode in enumerate(dataset.iterate_episodes()):
        np.testing.assert_array_equal(episode.actions, chosen(number, action), strict=True)
        for path, leaf in observation.items():
            values = episode.observations
            for part in path.split("/") if observation is NESTED else ():
                values = values[part]
            np.testing.assert_array_equal(values, seen(number, leaf), strict=True)
    assert number == 39


@pytest.mark.parametrize("action", [SEVERAL, FORCES], ids=["several", "forces"])
def test_robomimic_has_every_leaf_and_component(tmp_path, action):
    export(recorded(tmp_path, NESTED, action), "robomimic", tmp_path / "set")
    with h5py.File(tmp_path / "set") as file:
        for number in range(40):
            demo = file[f"data/demo_{number}"]
            np.testing.assert_array_equal(demo["actions"], chosen(number, action), strict=True)
            assert set(demo["obs"]) == {"arm_joints", "arm_grip", "camera", "goal"}
            for path, leaf in NESTED.items():
                values = seen(number, leaf)
                name = path.replace("/", "_")
                np.testing.assert_array_equal(demo["obs"][name], values[:-1], strict=True)
                np.testing.assert_array_equal(demo["next_obs"][name], values[1:], strict=True)


def test_d4rl_takes_one_leaf_with_any_action_and_refuses_several(tmp_path):
    run = recorded(tmp_path, ONE_LEAF, FORCES)
    export(run, "d4rl", tmp_path / "set")
    with h5py.File(tmp_path / "set") as file:
        wanted = [chosen(number, FORCES) for number in range(40)]
        np.testing.assert_array_equal(file["actions"], np.concatenate(wanted), strict=True)
    (tmp_path / "several").mkdir()
    run = recorded(tmp_path / "several", NESTED, FORCES)
    with pytest.raises(DataError, match="d4rl holds one observation array, here are 4"):
        export(run, "d4rl", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["minari", "d4rl", "robomimic"])
def test_a_damaged_final_observation_is_named_and_not_taken_for_a_full_disk(tmp_path, capsys, kind):
    path = write_run(tmp_path, env=IMAGES, segments=1)
    segment = path / "trajectories/inference-0-0/seg-00000.h5"
    with h5py.File(segment) as file:
        chunk = file["final_observation/obs"].id.get_chunk_info(0)
    data = bytearray(segment.read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    segment.write_bytes(data)
    assert main([str(path), "--format", kind, "-o", str(tmp_path / "set")]) == 2
    assert video([str(path), "--episode", "1", "-o", str(tmp_path / "set.gif")]) == 2
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 2
    for message in messages:
        assert f"{segment} is damaged: final_observation/obs 0 can't be read" in message
    assert [left.name for left in tmp_path.iterdir()] == ["run"]


def test_gymnasium_is_left_as_it_is():
    own = {"sutton_barto_reward": True}
    config = {"env": {"name": "gym:CartPole-v1", "options": {"kwargs": own}}}
    assert registered_spec(config).kwargs == own
    assert gymnasium.spec("CartPole-v1").kwargs == {}
    assert registered_spec({"env": {"name": "gym:CartPole-v1", "options": None}}).kwargs == {}
