"""Recordings of random play in tests."""

from analysis.reader import Run
from tests.acting_tools import Stage
from tests.recording_tools import naive_episodes, recorder_for


def recorded_stage(folder, kind, steps=120, **section):
    """A stage whose rows are recorded, after random steps; returns it and its recorder."""
    stage = Stage(kind)
    recorder = recorder_for(folder, stage.spec, stage.brain.behaviour, len(stage.envs), **section)
    stage.policy.sink = recorder
    for _ in range(steps):
        stage.step()
    recorder.close()
    return stage, recorder


def played_episodes(stage) -> dict[tuple[int, int], dict]:
    """Naive episodes of all environments by (environment, number)."""
    return {
        (env_id, number): episode
        for env_id, history in enumerate(stage.expected)
        for number, episode in enumerate(naive_episodes(history.rows))
    }


def by_identity(run: Run) -> dict[tuple[int, int], tuple[dict, dict]]:
    """Recorded episodes: steps and line of the index by (environment, number)."""
    table = run.episodes()
    return {
        (entry["env_id"], entry["episode"]): (run.episode(row), entry)
        for row, entry in enumerate(table.to_dict("records"))
    }
