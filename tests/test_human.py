import math

import pytest

from hpcrl.human import (
    format_bytes,
    format_count,
    format_duration,
    format_return,
    format_share,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (9.812, "9.81"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1 k"),
        (1230, "1.23 k"),
        (999_999, "1 M"),
        (4.21e6, "4.21 M"),
        (2e9, "2 G"),
        (3.5e12, "3.5 T"),
        (-4200, "-4.2 k"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_counts_have_three_digits_and_a_suffix(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 B"), (999.6, "1 kB"), (9.5e6, "9.5 MB"), (None, "-")]
)
def test_bytes_have_a_unit(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3600, "1 h 00 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 01 h"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_durations_have_their_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


def test_shares_are_per_cent_and_returns_say_how_few_episodes_they_are_over():
    assert format_share(0.876) == "88 %"
    assert format_share(None) == "-"
    assert format_return(-20.97, 100) == "-20.97"
    assert format_return(475.125, 7) == "475.1 (7 episodes)"
    assert format_return(1.0, None) == "1"
    assert format_return(None, 0) == "-"
