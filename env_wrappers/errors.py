"""The one error type for what the user can put right, and the hint at a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EnvError(ValueError):
    """A name, option, space or observation that cannot work; the message says what to do."""


class ActionError(EnvError):
    """An action that no environment could take: not the environment's failure."""


class EnvFailure(RuntimeError):
    """Environments that fail again and again; what they do can't be learned from."""


def closest_names(word: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The names of `known` most like `word`, best first, letter case ignored."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=limit, cutoff=0.5)
    return [by_lower[name] for name in found]


def suggestion(word: str, known: Iterable[str]) -> str:
    """The text "; did you mean 'x' or 'y'?" for a mistyped `word`, or nothing."""
    names = [repr(name) for name in closest_names(word, known)]
    return f"; did you mean {' or '.join(names)}?" if names else ""
