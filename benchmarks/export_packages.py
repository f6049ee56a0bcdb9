"""Read exports of a recording by the packages that define the formats, and compare every step.

    pip install --no-deps robomimic==0.3.0 d4rl==1.1 gym==0.26.2 gym_notices
    pip install tqdm termcolor minari==0.5.4
    python benchmarks/export_packages.py RUN --json benchmarks/results/export_packages.json

What these packages need for training and simulation isn't needed to read, so it isn't installed.
Claim: minari, robomimic and d4rl give back every observation, action, reward and end as recorded.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from analysis.export import action_of, episodes_of, export
from analysis.reader import Run


def expected(run: Run) -> list[dict]:
    """Every episode as the reader has it, observations `[T+1, ...]`."""
    (leaf,) = [name for name in run.columns if name.startswith("observation/")]
    return [
        {
            "obs": steps[leaf],
            "action": steps["action"],
            "flat_action": action_of(run, steps["action"]),
            "reward": steps["reward"],
            "terminated": steps["terminated"],
        }
        for _, steps in episodes_of(run)
    ]


def read_minari(path: Path, episodes: list[dict]) -> int:
    """Steps that minari reads back the same."""
    from minari import MinariDataset

    dataset = MinariDataset(path / "data")
    assert dataset.total_episodes == len(episodes)
    for read, episode in zip(dataset.iterate_episodes(), episodes, strict=True):
        np.testing.assert_array_equal(read.observations, episode["obs"])
        np.testing.assert_array_equal(read.actions, episode["flat_action"])
        np.testing.assert_array_equal(read.rewards, episode["reward"])
        np.testing.assert_array_equal(read.terminations, episode["terminated"])
        assert read.terminations[-1] or read.truncations[-1]
    assert len(dataset.sample_episodes(3)) == 3
    return dataset.total_steps


def read_robomimic(path: Path, episodes: list[dict]) -> int:
    """Steps that robomimic's data set of sequences reads back the same."""
    import robomimic.utils.obs_utils as obs_utils
    from robomimic.utils.dataset import SequenceDataset

    obs_utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": ["obs"]}})
    keys = ("actions", "rewards", "dones")
    transitions = SequenceDataset(str(path), ("obs",), keys, hdf5_cache_mode=None)
    place = 0
    for episode in episodes:
        last = len(episode["reward"]) - 1
        for step in range(last + 1):
            read = transitions[place]
            np.testing.assert_array_equal(read["obs"]["obs"][0], episode["obs"][step])
            np.testing.assert_array_equal(read["next_obs"]["obs"][0], episode["obs"][step + 1])
            np.testing.assert_array_equal(read["actions"][0], episode["action"][step])
            assert read["rewards"][0] == episode["reward"][step]
            assert bool(read["dones"][0]) == (step == last)
            place += 1
    assert place == len(transitions)
    train, valid = (
        SequenceDataset(str(path), ("obs",), keys, seq_length=4, filter_by_attribute=mask)
        for mask in ("train", "valid")
    )
    assert len(train) + len(valid) == place
    return place


def read_d4rl(path: Path, episodes: list[dict]) -> int:
    """Steps that d4rl's loader and its iterator over episodes read back the same."""
    os.environ["D4RL_SUPPRESS_IMPORT_ERROR"] = "1"
    import d4rl
    import gym
    from d4rl.offline_env import OfflineEnv

    env = OfflineEnv.__new__(OfflineEnv)  # its constructor wants the address of a download
    env.observation_space = gym.spaces.Box(-np.inf, np.inf, episodes[0]["obs"].shape[1:])
    env.action_space = gym.spaces.Box(-np.inf, np.inf, episodes[0]["flat_action"].shape[1:])
    dataset = env.get_dataset(h5path=str(path))
    read = list(d4rl.sequence_dataset(env, dataset=dataset))
    for found, episode in zip(read, episodes, strict=True):
        np.testing.assert_array_equal(found["observations"], episode["obs"][:-1])
        np.testing.assert_array_equal(found["next_observations"], episode["obs"][1:])
        np.testing.assert_array_equal(found["actions"], episode["flat_action"])
        np.testing.assert_array_equal(found["rewards"], episode["reward"])
        np.testing.assert_array_equal(found["terminals"], episode["terminated"])
    for_q = d4rl.qlearning_dataset(env, dataset=dataset)
    assert for_q["terminals"].sum() == dataset["terminals"][:-1].sum()
    return len(dataset["rewards"])


READERS = {"minari": read_minari, "robomimic": read_robomimic, "d4rl": read_d4rl}


def main() -> int:
    """Export, read and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = []
    for path in arguments.runs:
        run = Run(path)
        episodes = expected(run)
        steps = sum(len(episode["reward"]) for episode in episodes)
        for kind, read in READERS.items():
            with tempfile.TemporaryDirectory() as scratch:
                output = Path(scratch) / kind
                export(run, kind, output)
                same = read(output, episodes)
            line = {"environment": run.env_name, "package": f"{kind} {version(kind)}"}
            figures.append(
                {**line, "episodes": len(episodes), "steps": steps, "ratio": same / steps}
            )
            print(figures[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if all(line["ratio"] == 1.0 for line in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
