"""Exports hold what was recorded, exactly, as the formats' own readers see it."""

import json

import gymnasium
import h5py
import numpy as np
import pytest
from minari import MinariDataset

from analysis.errors import DataError
from analysis.export import export
from analysis.reader import Run
from analysis.segments import leaf_datasets
from tests.recording_tools import IMAGES, VECTOR, write_run


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
