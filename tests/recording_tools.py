"""Recordings for tests: rows told as episodes by a naive twin, and run directories by hand."""

import json
from pathlib import Path

import numpy as np

from hpcrl.config.load import parse_config, to_yaml
from hpcrl.config.sections import RecordingConfig
from hpcrl.recording import Recorder, SegmentWriter
from hpcrl.recording.episodes import column_specs
from hpcrl.recording.recorder import describe
from hpcrl.specs import ArraySpec
from tests.small import BASE, env_spec, merged

VECTOR = {"name": "synthetic:counting"}
IMAGES = {
    "name": "synthetic:counting",
    "options": {"observation_shape": [20, 24], "observation_dtype": "uint8"},
}


def recorder_for(folder, spec, behaviour, num_envs, max_bytes=0, waits=False, **section):
    """A recorder of environments 0..n-1 whose seeds are 100 + id."""
    config = RecordingConfig(enabled=True, **section)
    seeds = {index: 100 + index for index in range(num_envs)}
    attributes = {"fraction": config.fraction, "code_version": "0", "config": ""}
    return Recorder(folder, config, spec, behaviour, seeds, attributes, max_bytes, waits=waits)


def naive_episodes(rows):
    """One environment's rows (`tests.acting_tools.Expected`) as episodes, step by step."""
    episodes, current = [], None
    for row in rows:
        if current is not None and current["obs"]:
            if row["terminated"] or row["final"] or not row["start"]:
                current["reward"].append(row["reward"])
            if row["terminated"]:
                current["ending"] = "terminated"
            if row["final"]:
                current["ending"], current["last"] = "truncated", row["obs"]
            if row["start"] or row["final"]:
                episodes.append(current)
                current = None
        if row["final"]:
            continue
        if row["start"]:
            current = {"obs": [], "action": [], "reward": [], "ending": "interrupted", "last": None}
        current["obs"].append(row["obs"])
        current["action"].append(row["action"])
    if current is not None and len(current["obs"]) > 1:
        current["last"] = current["obs"].pop()
        current["action"].pop()
        episodes.append(current)
    return episodes


def assert_same_episode(steps, entry, expected):
    """Assert that a recorded episode, as the reader gives it, is the expected one."""
    np.testing.assert_array_equal(steps["reward"], np.float32(expected["reward"]))
    np.testing.assert_array_equal(steps["action"], np.array(expected["action"]))
    for path in expected["obs"][0]:
        frames = np.array([obs[path] for obs in expected["obs"]])
        np.testing.assert_array_equal(steps[f"observation/{path}"], frames)
        if expected["ending"] == "terminated":
            assert f"final/{path}" not in steps
        else:
            np.testing.assert_array_equal(steps[f"final/{path}"], expected["last"][path])
    last = [False] * (len(expected["reward"]) - 1) + [True]
    never = [False] * len(expected["reward"])
    ending = expected["ending"]
    assert steps["terminated"].tolist() == (last if ending == "terminated" else never)
    assert steps["truncated"].tolist() == (last if ending == "truncated" else never)
    assert entry["complete"] == (ending != "interrupted")
    assert entry["length"] == len(expected["reward"])


def write_run(
    root: Path,
    name: str = "run",
    env=VECTOR,
    episodes=40,
    segments=2,
    reward=1.0,
    seed=1,
    records=6,
    actors=1,
):
    """A run directory as training leaves it, with `episodes` recorded; returns its path.

    Episode k has 3 + k % 5 steps with `reward` each.
    """
    run = root / name
    run.mkdir()
    sections = {"env": env, "run": {"seed": seed, "dir": str(run)}, "recording": {"enabled": True}}
    config = parse_config(merged(BASE, sections))
    (run / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    roles = ["learner", "inference", *["actor"] * actors]
    ranks = [{"rank": i, "host": "a", "role": role} for i, role in enumerate(roles)]
    topology = {"nodes": [{"host": "a", "num_cores": 2}], "ranks": ranks}
    (run / "topology.json").write_text(json.dumps(topology), encoding="utf-8")
    status = {"state": "done", "counters": {"frames": 600}, "mean_return_100": 5.0}
    (run / "STATUS.json").write_text(json.dumps(status), encoding="utf-8")
    with (run / "metrics.jsonl").open("w") as file:
        for index in range(records):
            file.write(json.dumps(metrics_record(index, seed)) + "\n")
    write_segments(run, config, episodes, segments, reward)
    return run


def metrics_record(index, seed):
    """Record `index` of a run that makes 100 frames/s and gains `seed` return per record."""
    return {
        "time_unix_s": 1e9 + index,
        "restart": 0,
        "learner_steps": 10 * (index + 1),
        "agent_steps": 100 * (index + 1),
        "frames": 100 * (index + 1),
        "episodes": 5 * index,
        "wall_time_s": 1.0 + index,
        "mean_return_100": None if index == 0 else float(seed * index),
        "frames_per_s": 100.0,
        "learner_steps_per_s": 10.0,
        "policy_lag": 0.5 * index,
        "actor_step_share": 0.75,
        "actor_wait_share": 0.25,
    }


def write_segments(run, config, episodes, segments, reward):
    """Write closed segments into a run."""
    spec = env_spec(config.env.name, **config.env.options)
    behaviour = {"log_prob": ArraySpec((), "float32")}
    columns = column_specs(spec, behaviour, config.recording.fields)
    folder = run / "trajectories" / "inference-0-0"
    folder.mkdir(parents=True)
    attributes = {
        **describe(config, "inference", 0, 0, "0"),
        "env": json.dumps(spec.to_json()),
        "topology": "{}",
    }
    for number in range(segments):
        path = folder / f"seg-{number:05d}.h5"
        writer = SegmentWriter(path, columns, attributes, config.recording.compression)
        for episode in range(number * episodes // segments, (number + 1) * episodes // segments):
            append_episode(writer, columns, episode, reward)
        writer.close("finished" if number == segments - 1 else "followed", {})


def append_episode(writer, columns, episode, reward=1.0):
    """Append episode number `episode`, whose values follow from that number and the step."""
    length = 3 + episode % 5
    terminated = episode % 2 == 0
    step = np.arange(length)
    values = {
        "reward": np.full(length, reward),
        "action": (step % 3)[:, None],
        "terminated": (step == length - 1) & terminated,
        "truncated": (step == length - 1) & (not terminated),
        "policy_version": np.full(length, episode),
    }
    steps = {
        name: [
            np.broadcast_to(
                values.get(name, (episode + step).reshape(-1, *[1] * len(spec.shape))),
                (length, *spec.shape),
            ).astype(spec.dtype)
        ]
        for name, spec in columns.items()
    }
    final = None
    if not terminated:
        final = {
            name.removeprefix("observation/"): np.full(spec.shape, 200, spec.dtype)
            for name, spec in columns.items()
            if name.startswith("observation/")
        }
    entry = {
        "return": float(length * reward),
        "env_id": 0,
        "episode": episode,
        "env_seed": 100,
        "evaluation": False,
        "complete": True,
        "terminated": terminated,
        "truncated": not terminated,
        "first_policy_version": episode,
        "last_policy_version": episode,
        "end_unix_s": 1e9 + episode,
    }
    writer.append(steps, final, entry)
