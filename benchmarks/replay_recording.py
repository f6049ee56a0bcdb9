"""Play the recorded actions of an Atari run again, from its seeds; compare every frame and reward.

    python benchmarks/replay_recording.py RUN --json benchmarks/results/replay_recording.json

Claim: in the deterministic setting (`repeat_action_probability` 0) what was recorded is what was
played. An environment's episodes follow from its first seed and all actions before, so a sample is
the first episodes of some environments, all steps of them.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from analysis.reader import Run
from env_wrappers import make


def replay(run: Run, env_id: int, most_steps: int) -> tuple[int, int]:
    """Episodes and steps of an environment that came out the same; raises where one doesn't."""
    table = run.episodes()
    mine = table[(table["env_id"] == env_id) & (table["restart"] == 0)].sort_values("episode")
    assert mine["episode"].tolist() == list(range(len(mine))), "an episode is absent"
    assert mine["env_seed"].nunique() == 1
    seed = int(mine["env_seed"].iloc[0])
    envs = make(run.env_name, 1, [seed], run.config["env"]["options"])
    batch, episodes, count = envs.reset(), 0, 0
    for row in mine.index:
        steps = run.episode(int(row))
        for frame, action, reward, terminated, truncated in zip(
            steps["observation/obs"],
            steps["action"],
            steps["reward"],
            steps["terminated"],
            steps["truncated"],
            strict=True,
        ):
            np.testing.assert_array_equal(batch.observation["obs"][0], frame)
            batch = envs.step(action[None])
            assert batch.reward[0] == reward
            if table["complete"][row]:
                assert (batch.terminated[0], batch.truncated[0]) == (terminated, truncated)
        episodes, count = episodes + 1, count + len(steps["reward"])
        if count >= most_steps:
            break
    envs.close()
    return episodes, count


def main() -> int:
    """Replay, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--envs", type=int, default=8, help="environments of the sample")
    parser.add_argument(
        "--steps", type=int, default=1000, help="of each of them, and a little more"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run = Run(arguments.run)
    env_ids = sorted(set(run.episodes()["env_id"].tolist()))
    chosen = env_ids[:: max(1, len(env_ids) // arguments.envs)][: arguments.envs]
    played = [replay(run, env_id, arguments.steps) for env_id in chosen]
    figures = {
        "environment": run.env_name,
        "environments": len(chosen),
        "episodes": sum(episodes for episodes, _ in played),
        "steps": sum(steps for _, steps in played),
        "ratio": 1.0,
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
