"""Whole jobs record every episode of every environment, in every layout."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest
import yaml

import hpcrl
from analysis.reader import Run
from hpcrl.recording import recorder
from tests.loopback_job import JobRun
from tests.recording_tools import assert_same_episode, naive_episodes
from tests.small import config_of

LAYOUTS = {
    "seed": ({}, {"inference": 2, "actors": 2}, 5),
    "impala": ({"layout": "impala"}, {"inference": "auto", "actors": 2}, 3),
    "sync": ({"layout": "sync", "agent": {"name": "ppo"}}, {"inference": 2, "actors": 2}, 5),
    "sync-local": (
        {"layout": "sync", "placement": "local", "agent": {"name": "ppo"}},
        {"inference": "auto", "actors": 2},
        3,
    ),
}


def recorded_config(folder, sections, topology, agent_steps=300, **recording):
    return config_of(
        **sections,
        learner={"batch_unrolls": 8, "unroll_steps": 3, "backend": "mpi"},
        run={"dir": str(folder), "seed": 11},
        env={
            "name": "synthetic:counting",
            "envs_per_actor": 4,
            "groups": 2,
            "options": {
                "episode_length": 3,
                "length_spread": 4,
                "truncate": True,
                "observation_shape": [2],  # small numbers, so that every action is taken
            },
        },
        topology=topology,
        recording={"enabled": True, **recording},
        stop={"agent_steps": agent_steps},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_job_records_every_episode_of_every_environment(tmp_path, monkeypatch, layout):
    sections, topology, size = LAYOUTS[layout]
    config = recorded_config(tmp_path, sections, topology)
    job = JobRun(monkeypatch).start(config, size)
    assert job.codes == [0] * size
    run = Run(tmp_path)
    table = run.episodes()
    role = "inference" if size == 5 else "worker"
    assert set(table["writer"]) == {f"{role}-0-0", f"{role}-1-0"}
    assert run.notes == []
    without = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))
    shutil.rmtree(without / "trajectories" / f"{role}-1-0")
    partly = Run(without)
    assert partly.episodes()["env_id"].nunique() == 4
    (note,) = partly.notes
    assert f"{role} 1 of start 0 has no segment here" in note
    assert table["env_id"].nunique() == 8
    histories = dict(zip(job.seeds, job.histories, strict=True))
    per_env_last = table.groupby("env_id")["episode"].max()
    for row, entry in enumerate(table.to_dict("records")):
        played = naive_episodes(histories[entry["env_seed"]].rows)
        if entry["episode"] == len(played):  # it had begun, and no answer came
            assert entry["length"] == 1
            continue
        expected = played[entry["episode"]]
        steps = run.episode(row)
        if entry["complete"] and expected["ending"] != "interrupted":
            assert_same_episode(steps, entry, expected)
            continue
        # The last rows of the environment may not have been answered, or not been recorded.
        common = min(entry["length"], len(expected["reward"]))
        assert entry["episode"] == per_env_last[entry["env_id"]]
        for name in ("reward", "action"):
            np.testing.assert_array_equal(steps[name][:common], expected[name][:common])
    per_env = table.groupby("env_id")["episode"]
    assert (per_env.max() + 1 == per_env.count()).all()
    last = run.metrics().iloc[-1]
    assert last["dropped_episodes"] == 0
    assert 0 < last["recorded_episodes"] <= len(table)
    assert run.config["recording"]["enabled"] is True
    assert set(run.steps("action")[:].ravel()) == {0, 1, 2, 3}
    check_attributes(run, role)


def check_attributes(run, role):
    """Against the files that the learner writes, and HDF5's own view of the attributes."""
    topology = json.loads((run.path / "topology.json").read_text())
    status = json.loads((run.path / "STATUS.json").read_text())
    ranks = [entry["rank"] for entry in topology["ranks"] if entry["role"] == role]
    assert len(ranks) == 2
    assert status["hpcrl_version"].startswith(hpcrl.__version__)
    first_line = (run.path / "config.yaml").read_text().splitlines()[0]
    assert first_line.startswith(f"# hpcrl {status['hpcrl_version']}, ")
    for index, rank in enumerate(ranks):
        (path,) = (run.path / "trajectories" / f"{role}-{index}-0").iterdir()
        with h5py.File(path, locking=False) as file:
            found = dict(file.attrs)
        assert json.loads(found["topology"]) == topology
        assert yaml.safe_load(found["config"]) == run.config
        assert {name: found[name] for name in ("rank", "role", "role_index", "restart")} == {
            "rank": rank, "role": role, "role_index": index, "restart": 0,
        }  # fmt: skip
        assert (found["seed"], found["fraction"], found["segment"]) == (11, 1.0, 0)
        assert found["code_version"] == status["hpcrl_version"]
        assert found["env_name"] == "synthetic:counting"
        assert json.loads(found["fields"]) == ["observation", "policy_version", "behaviour"]
        assert status["started_unix_s"] < found["created_unix_s"] < found["closed_unix_s"]


def test_a_start_with_fewer_recording_ranks_has_no_more_room_than_is_left(tmp_path, monkeypatch):
    rooms = []

    class Noting(recorder.Recorder):
        def __init__(self, *arguments):
            rooms.append(arguments[6])
            super().__init__(*arguments)

    monkeypatch.setattr(recorder, "Recorder", Noting)
    ranks = {"inference": 2, "actors": 2}
    config = recorded_config(tmp_path, {}, ranks, max_bytes=50_000_000)
    assert JobRun(monkeypatch).start(config, 5).codes == [0] * 5
    assert rooms == [25_000_000] * 2
    killed = tmp_path / "trajectories" / "inference-1-0" / ".seg-00001.h5.tmp"
    killed.write_bytes(bytes(1000))
    used = sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(tmp_path / "trajectories")
        for name in names
    )
    assert used > 10_000
    fewer = {"inference": 1, "actors": 2}
    config = recorded_config(tmp_path, {}, fewer, 600, max_bytes=50_000_000)
    assert JobRun(monkeypatch).start(config, 4).codes == [0] * 4
    assert rooms[2:] == [50_000_000 - used]
