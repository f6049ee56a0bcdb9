"""From rows to whole episodes: which are kept, and the memory that they take."""

import numpy as np
import pytest

from analysis import missing
from hpcrl.recording import Budget, EpisodeBuilder, is_selected
from hpcrl.specs import ArraySpec


def test_the_hash_selects_the_fraction_and_nests():
    identities = [(env_id, episode) for env_id in range(40) for episode in range(100)]
    chosen = {f: {i for i in identities if is_selected(*i, f)} for f in (0.0, 0.1, 0.5, 1.0)}
    assert chosen[0.0] == set()
    assert chosen[1.0] == set(identities)
    assert chosen[0.1] < chosen[0.5]
    # 4000 draws: five standard deviations are 95 and 158.
    assert abs(len(chosen[0.1]) - 400) < 95
    assert abs(len(chosen[0.5]) - 2000) < 158
    assert all(missing.is_selected(*i, 0.3) == is_selected(*i, 0.3) for i in identities)


def test_an_episode_that_does_not_fit_is_dropped_whole_and_its_memory_returned():
    columns = {"reward": ArraySpec((), "float32"), "observation/o": ArraySpec((1000,), "uint8")}
    budget = Budget(100_000)
    builder = EpisodeBuilder(np.arange(2), columns, 1.0, budget)

    def rows(start, terminated=False):
        return {
            "reward": np.ones(2, np.float32),
            "obs:o": np.zeros((2, 1000), np.uint8),
            "start": np.array([start, start or terminated]),
            "final": np.zeros(2, bool),
            "terminated": np.array([False, terminated]),
        }

    ids = np.arange(2)
    ended = builder.add(ids, rows(True))
    for step in range(200):  # 2 x 200 kB: neither fits while both run
        ended += builder.add(ids, rows(False, terminated=step % 10 == 9))
    ended += builder.finish()
    # Environment 0's endless episode is dropped; environment 1's of 10 steps (10 kB) are kept.
    assert builder.dropped == 1 + 20 - len(
        [e for e in ended if e.env_id == 1 and e.ending[0] == "t"]
    )
    assert {episode.env_id for episode in ended} == {1}
    for episode in ended:
        budget.give(episode.nbytes)
    assert budget.take(100_000)


@pytest.mark.parametrize("columns", [{}, {"observation/o": ArraySpec((100_000,), "uint8")}])
def test_an_episode_without_a_result_is_no_episode_and_keeps_no_memory(columns):
    """It is interrupted after one row; with wide rows that row is in its chunk already."""
    budget = Budget(200_000)
    columns = {"reward": ArraySpec((), "float32"), **columns}
    builder = EpisodeBuilder(np.arange(1), columns, 1.0, budget)
    rows = {
        "reward": np.ones(1, np.float32),
        "obs:o": np.zeros((1, 100_000), np.uint8),
        "start": np.array([True]),
        "final": np.array([False]),
        "terminated": np.array([False]),
    }
    for _ in range(5):  # each start interrupts the episode before
        assert builder.add(np.arange(1), rows) == []
    assert builder.finish() == []
    assert builder.dropped == 0
    assert budget.take(200_000)


def test_an_episode_of_many_chunks_has_all_its_steps_and_its_final_observation():
    columns = {"reward": ArraySpec((), "float32"), "observation/o": ArraySpec((1000,), "uint8")}
    builder = EpisodeBuilder(np.arange(1), columns, 1.0, Budget(10**6))
    played = np.random.default_rng(0).integers(0, 256, (200, 1000), np.uint8)
    for step, frame in enumerate(played):
        rows = {
            "reward": np.array([step], np.float32),
            "obs:o": frame[None],
            "start": np.array([step == 0]),
            "final": np.array([step == 199]),
            "terminated": np.array([False]),
        }
        ended = builder.add(np.arange(1), rows)
    (episode,) = ended
    assert len(episode.chunks) > 3
    steps = episode.steps(columns)
    np.testing.assert_array_equal(np.concatenate(steps["observation/o"]), played[:199])
    assert np.concatenate(steps["reward"]).tolist() == list(range(1, 200))
    np.testing.assert_array_equal(episode.final_observation()["o"], played[199])
