"""Whole jobs record every episode of every environment, in every layout."""

import numpy as np
import pytest

from analysis.reader import Run
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_job_records_every_episode_of_every_environment(tmp_path, monkeypatch, layout):
    sections, topology, size = LAYOUTS[layout]
    config = config_of(
        **sections,
        learner={"batch_unrolls": 8, "unroll_steps": 3, "backend": "mpi"},
        run={"dir": str(tmp_path)},
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
        recording={"enabled": True},
        stop={"agent_steps": 300},
    )
    job = JobRun(monkeypatch).start(config, size)
    assert job.codes == [0] * size
    run = Run(tmp_path)
    table = run.episodes()
    role = "inference" if size == 5 else "worker"
    assert set(table["writer"]) == {f"{role}-0-0", f"{role}-1-0"}
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
