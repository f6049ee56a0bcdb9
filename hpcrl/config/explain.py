"""pydantic's findings in the words of a configuration file: key, what it must be, what it was."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from hpcrl.agents import AGENTS

_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "keys with values, such as {{key: value}}",
    "tuple_type": "a list, such as [64, 64]",
    "literal_error": "{expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "dataclass_type": "a section with keys of its own",
    "union_tag_not_found": "a section with keys of its own",
}
"""By pydantic's error type, what follows "must be"; the names in braces are of its context."""

_SECTIONS_BY_NAME = {"agent": AGENTS}
"""Sections of which there are several, told apart by their key `name`."""

_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def explain(error: ValidationError, known: Sequence[str]) -> str:
    """Return one line that names every wrong key, its value and what it must be.

    Args:
      error: of validating a configuration.
      known: dotted names of all keys, sections included.
    """
    unknown: list[str] = []
    wanted: dict[str, tuple[list[str], Any]] = {}
    said: list[str] = []
    for item in error.errors():
        path = _path(item["loc"])
        if item["type"] in _UNKNOWN:
            unknown.append(f"unknown key {path}{_hint(path, known)}")
        elif item["type"] == "union_tag_invalid":
            path += ".name"
            names = " or ".join(map(repr, _SECTIONS_BY_NAME[path.rpartition(".")[0]]))
            wanted[path] = [names], item["input"]["name"]
        elif item["type"] == "value_error":
            said.append(f"{path}: {item['ctx']['error']}")
        else:
            # A union reports one error per member, all for the same key and value.
            alternatives, _ = wanted.setdefault(path, ([], item["input"]))
            phrase = item["msg"]
            if item["type"] in _WANTED:
                phrase = _WANTED[item["type"]].format(**item.get("ctx", {}))
            if phrase not in alternatives:
                alternatives.append(phrase)
    bounds = [f"{p} must be {' or '.join(w)}, got {v!r}" for p, (w, v) in wanted.items()]
    return "; ".join(unknown + said + bounds)


def _path(location: Sequence[int | str]) -> str:
    """Dotted name of a place; a union's member names aren't part of it."""
    parts = [part for part in location if not _is_union_member(part)]
    if len(parts) > 1 and parts[1] in _SECTIONS_BY_NAME.get(str(parts[0]), ()):
        del parts[1]
    return ".".join(map(str, parts))


def _is_union_member(part: int | str) -> bool:
    return isinstance(part, str) and (part in ("int", "float", "str", "none") or "[" in part)


def _hint(path: str, known: Sequence[str]) -> str:
    section, _, leaf = path.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(leaf, beside, 1, 0.6)
    if near:
        return f"; did you mean {beside[near[0]]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {f'keys of {section} are' if section else 'sections are'} {', '.join(beside)}"
