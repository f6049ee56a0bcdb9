"""Numbers as people read them."""

from __future__ import annotations

import math

NONE = "-"

_SUFFIXES = ("", " k", " M", " G", " T")


def format_count(value: float | None) -> str:
    """Return three significant digits and a suffix: `1.23 M`; `-` for None and NaN."""
    if value is None or not math.isfinite(value):
        return NONE
    for suffix in _SUFFIXES:
        text = f"{value:.3g}"
        if abs(float(text)) < 1000:
            return text + suffix
        value /= 1000
    return f"{value:.3g}{_SUFFIXES[-1]}"


def format_bytes(value: float | None) -> str:
    """Return bytes with a decimal prefix: `1.23 MB`."""
    text = format_count(value)
    return f"{text} B" if text[-1].isdigit() else text if text == NONE else f"{text}B"


def format_share(value: float | None) -> str:
    """Return a share of 1 as whole per cent."""
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.0f} %"


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: `2 min 05 s`."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    for unit, part, size_s, part_s in (
        ("d", "h", 86400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= size_s:
            return f"{whole // size_s} {unit} {whole % size_s // part_s:02d} {part}"
    raise AssertionError(whole)


def format_return(mean: float | None, episodes: float | None) -> str:
    """Return a mean return, with the number of episodes while there are fewer than 100."""
    if mean is None or not math.isfinite(mean):
        return NONE
    text = f"{mean:.4g}"
    return text if episodes is None or episodes >= 100 else f"{text} ({episodes:.0f} episodes)"
