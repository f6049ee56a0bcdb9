"""Writes docs/configuration.md from the dataclasses: `python -m hpcrl.config.document`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.config.root import CONFIG_ADAPTER

_HEADER = """\
# Configuration

<!-- Written by `make docs` from the dataclasses of hpcrl/config and hpcrl/agents; edit those. -->

A run is described by one YAML file. Every key has a default, so a file names only what differs:

```yaml
env:
  name: atari:Breakout
  options: {frame_stack: 4}
learner: {batch_unrolls: 32}
stop: {frames: 5_000_000}
```

On the command line `--learner.batch_unrolls 64` (or `--learner.batch_unrolls=64`) goes before
the file. Numbers may be written as `1e-4` or `5_000_000`. An unknown key, a wrong type or a value
out of bounds ends the command with exit code 2 before anything starts. The run directory's
`config.yaml` holds every key with the value that was used. Units are in the names: `_s` seconds,
`_bytes`, `_frames` emulator frames, `_steps` agent steps, `_unrolls`, `_rows` environments.
"""

_BOUNDS = (
    ("exclusiveMinimum", "> {}"),
    ("minimum", "≥ {}"),
    ("exclusiveMaximum", "< {}"),
    ("maximum", "≤ {}"),
)


def document() -> str:
    """Return the whole page."""
    schema = CONFIG_ADAPTER.json_schema()
    pages = [_HEADER, *_section("", schema, schema["$defs"])]
    return "\n".join(pages)


def _section(
    prefix: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a section's table, then its sub-sections; the top level has no name."""
    nested: dict[str, list[Any]] = {}
    rows = []
    for name, entry in schema["properties"].items():
        references = [e["$ref"] for e in entry.get("oneOf", [entry]) if "$ref" in e]
        if references:
            nested[name] = [definitions[r.rpartition("/")[2]] for r in references]
        else:
            rows.append(_row(prefix + name, entry))
    if prefix:
        named = schema["properties"].get("name", {}).get("const")
        title = prefix.rstrip(".") + (f" (name: {named})" if named else "")
        yield f"## {title}\n\n{_line(schema['description'])}\n"
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""
    for name, sections in nested.items():
        for section in sections:
            yield from _section(f"{prefix}{name}.", section, definitions)


def _row(key: str, entry: Mapping[str, Any]) -> str:
    default = json.dumps(entry.get("default", {})).strip('"')
    cells = (f"`{key}`", _type(entry), f"`{default}`" if default else "", entry["description"])
    return f"| {' | '.join(_line(cell).replace('|', '&#124;') for cell in cells)} |"


def _type(entry: Mapping[str, Any]) -> str:
    """Type, choices and bounds of one value in words."""
    if "anyOf" in entry:
        return " or ".join(_type(member) for member in entry["anyOf"])
    choices = entry.get("enum", [entry["const"]] if "const" in entry else [])
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if entry["type"] == "array":
        return f"list of {_type(entry['items'])}"
    names = {
        "integer": "whole number",
        "string": "text",
        "object": "mapping",
        "boolean": "true or false",
        "null": "`null`",
    }
    bounds = [text.format(entry[name]) for name, text in _BOUNDS if name in entry]
    return " ".join([names.get(entry["type"], entry["type"]), ", ".join(bounds)]).strip()


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    print(document(), end="")
