"""Statistics against arithmetic that can be followed."""

import io
import sys

import numpy as np
import pandas as pd
import pytest

from analysis import compare, learning_curve
from analysis._common import command
from analysis.errors import DataError
from analysis.rliable_statistics import statistics_from
from analysis.statistics import (
    bootstrap,
    bootstrap_difference,
    iqm,
    mean,
    on_grid,
    probability_of_improvement,
)
from tests.recording_tools import write_run


def test_iqm_is_the_mean_of_the_middle_half():
    assert iqm(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == (2 + 3 + 4 + 5) / 4
    assert iqm(np.array([1.0, 2, 9])) == 4.0  # too few to leave any out


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    samples = np.random.default_rng(1).normal(10, 2, 400)
    value, low, high = bootstrap(samples, mean)
    half = 1.96 * samples.std() / 20
    assert value == pytest.approx(samples.mean())
    assert (low, high) == pytest.approx((value - half, value + half), abs=0.15 * half)


def test_the_interval_of_a_difference_adds_variances():
    rng = np.random.default_rng(2)
    a, b = rng.normal(0, 1, 300), rng.normal(3, 2, 500)
    value, low, high = bootstrap_difference(a, b)
    half = 1.96 * np.sqrt(a.var() / 300 + b.var() / 500)
    assert value == pytest.approx(b.mean() - a.mean())
    assert (low, high) == pytest.approx((value - half, value + half), abs=0.15 * half)


def test_probability_of_improvement_counts_pairs():
    assert probability_of_improvement([1, 2], [2, 3]) == (3 + 0.5) / 4


def test_curves_are_interpolated_where_all_of_them_are():
    first = (np.array([0.0, 10.0]), np.array([0.0, 10.0]))
    second = (np.array([5.0, 20.0]), np.array([0.0, 15.0]))
    grid, values = on_grid([first, second], 6)
    assert grid.tolist() == [5, 6, 7, 8, 9, 10]
    np.testing.assert_allclose(values, [grid, grid - 5])
    with pytest.raises(ValueError, match="share no part"):
        on_grid([first, (np.array([11.0, 12.0]), np.zeros(2))])


def test_rliable_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rliable", None)
    with pytest.raises(DataError, match=r"pip install 'hpcrl\[rliable\]'"):
        statistics_from("rliable")


def test_rliable_agrees():
    pytest.importorskip("rliable")
    theirs, ours = statistics_from("rliable"), statistics_from("own")
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 11).astype(np.float64), rng.normal(6, 2, 30)
    for values in (a, b, b.reshape(2, 15), b[:3]):
        np.testing.assert_allclose(theirs.iqm(values), ours.iqm(values))
        np.testing.assert_allclose(theirs.mean(values), ours.mean(values))
    assert bootstrap(a, theirs.iqm) == pytest.approx(bootstrap(a, ours.iqm))
    for first, second in ((a, b), (b, a), (a, a[:5])):
        assert theirs.probability_of_improvement(first, second) == pytest.approx(
            ours.probability_of_improvement(first, second)
        )


@pytest.mark.parametrize("module", [compare, learning_curve], ids=lambda module: module.__name__)
def test_scripts_answer_the_same_with_either_source(tmp_path, capsys, module):
    pytest.importorskip("rliable")
    runs = [str(write_run(tmp_path, f"s{seed}", seed=seed)) for seed in (1, 2, 4, 9)]
    words = [*runs[:2], "--versus", *runs[2:]] if module is compare else runs
    said = []
    for source in ("own", "rliable"):
        options = [*words, "--format", "csv", "--statistics", source]
        assert command("x", None, module.analyse, module.add_options, options) == 0
        out, err = capsys.readouterr()
        said.append((pd.read_csv(io.StringIO(out)), err))
    pd.testing.assert_frame_equal(said[0][0], said[1][0])
    assert said[0][1] == said[1][1]
