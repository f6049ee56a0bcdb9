"""All 57 Atari games, 1000 agent steps each; collected by `make test-envs` only."""

import pytest

from tests.jobs.atari_games import GAMES, play_game


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_a_game_trains_through_the_whole_pipeline(game, tmp_path, monkeypatch):
    play_game(game, tmp_path, monkeypatch)
