"""Human-normalised Atari scores: 0 is random play, 1 a professional human tester."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files


@cache
def reference_scores() -> dict[str, tuple[float, float]]:
    """Return (random, human) mean returns by plain game name, from data/atari_scores.csv."""
    text = (files("hpcrl") / "data" / "atari_scores.csv").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {
        _plain(row["game"]): (float(row["random"]), float(row["human"]))
        for row in csv.DictReader(lines)
    }


def human_normalised(env_name: str, score: float) -> float | None:
    """Return (score - random) / (human - random); None where the references aren't known.

    Args:
      env_name: such as "atari:Breakout".
      score: unclipped return of whole games.
    """
    family, _, game = env_name.partition(":")
    known = reference_scores().get(_plain(game)) if family == "atari" else None
    if known is None:
        return None
    random, human = known
    return (score - random) / (human - random)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
