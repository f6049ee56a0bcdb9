"""Some Atari games through the whole pipeline; `make test-envs` runs all 57."""

import pytest

from tests.jobs.atari_games import GAMES, play_game


def test_there_are_57_games():
    assert len(GAMES) == 57


@pytest.mark.parametrize("game", ["montezuma_revenge", "video_pinball"])
def test_a_game_trains_through_the_whole_pipeline(game, tmp_path, monkeypatch):
    play_game(game, tmp_path, monkeypatch, steps=200)
