"""The table of many games, against arithmetic by hand."""

import json

import pandas as pd
import pytest

from analysis.games import main


def evaluated(root, name, env_name, scores, human_normalised):
    """A run directory with evaluations of steps 9, 10, ... of these mean returns."""
    (root / name).mkdir()
    (root / name / "metrics.jsonl").touch()
    for step, score in enumerate(scores, 9):
        folder = root / name / "evaluations" / f"step-{step}-0"
        folder.mkdir(parents=True)
        summary = {
            "env_name": env_name,
            "mean_return": score,
            "human_normalised": human_normalised,
            "episodes": 5,
            "frames": 100 * step,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return str(root / name)


def test_the_newest_evaluation_counts_and_runs_of_a_game_are_averaged(tmp_path):
    runs = [
        evaluated(tmp_path, "a", "atari:Pong", [1.0, 7.0], 0.5),
        evaluated(tmp_path, "b", "atari:Pong", [9.0], 0.9),
        evaluated(tmp_path, "c", "atari:Breakout", [30.0], 1.0),
        evaluated(tmp_path, "d", "atari:Alien", [100.0], 0.1),
        evaluated(tmp_path, "e", "minatar:Breakout", [3.0], None),
    ]
    output = tmp_path / "table.csv"
    assert main([*runs, "-o", str(output)]) == 0
    table = pd.read_csv(output).set_index("game")
    assert table.loc["atari:Pong", ["runs", "episodes", "frames"]].tolist() == [2, 10, 900]
    assert table.loc["atari:Pong", "mean_return"] == 8.0
    assert table.loc["atari:Pong", "human_normalised"] == pytest.approx(0.7)
    assert pd.isna(table.loc["minatar:Breakout", "human_normalised"])
    assert table.loc["median of 3 games", "human_normalised"] == pytest.approx(0.7)
    assert table.loc["mean of 3 games", "human_normalised"] == pytest.approx(0.6)


def test_a_run_without_evaluation_or_with_a_damaged_one_is_told(tmp_path, capsys):
    (tmp_path / "never").mkdir()
    (tmp_path / "never" / "metrics.jsonl").touch()
    assert main([str(tmp_path / "never")]) == 2
    assert "has no evaluation: run `hpcrl eval" in capsys.readouterr().err
    run = evaluated(tmp_path, "a", "atari:Pong", [1.0], 0.5)
    (tmp_path / "a" / "evaluations" / "step-9-0" / "summary.json").write_text("{")
    assert main([run]) == 2
    assert "is damaged" in capsys.readouterr().err
