"""YAML file and dotted overrides into a `Config`; errors name key, value and bound."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hpcrl.config.root import CONFIG_ADAPTER, Config


class ConfigError(ValueError):
    """The configuration can't be used; the message says which key, value and bound."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number (YAML 1.1 wants 1.0e-4) and refuses a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            line = node.start_mark.line + 1
            raise ConfigError(f"line {line}: key given twice: {', '.join(map(str, twice))}")
        return super().construct_mapping(node, deep)


def _scalar(text: Any) -> Any:
    """Read numbers such as 1e-4 and 1e6 that YAML 1.1 takes for strings."""
    if isinstance(text, str):
        try:
            return float(text) if any(c in text for c in "eE.") else int(text)
        except ValueError:
            return text
    return text


def _numbers(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_numbers(value) for value in tree]
    return _scalar(tree)


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Turn `--a.b value` and `--a.b=value` into a nested dict.

    Raises:
      ConfigError: an argument is not an override, or lacks its value.
    """
    tree: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; overrides look like --env.name VALUE")
        path, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{path} lacks a value")
            value = rest.pop(0)
        node = tree
        *parents, leaf = path.replace("-", "_").split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"--{path}: {parent} was already given a value")
        try:
            node[leaf] = _numbers(yaml.load(value, _Loader)) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"--{path}: value {value!r} is not valid YAML: {error}") from error
    return tree


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def known_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    """Dotted names of all keys of `cls`, sections included."""
    keys = []
    for entry in dataclasses.fields(cls):
        keys.append(prefix + entry.name)
        nested = entry.default_factory
        if dataclasses.is_dataclass(nested):
            keys += known_keys(nested, prefix + entry.name + ".")
    return keys


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        # A union reports one error per member; its member names aren't part of the path.
        path = ".".join(str(part) for part in item["loc"] if not _is_union_member(part))
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            near = difflib.get_close_matches(path, known_keys(), 1, 0.5)
            leaf = path.rpartition(".")[2]
            near = near or [k for k in known_keys() if k.rpartition(".")[2] == leaf][:1]
            hint = f"; did you mean {near[0]}?" if near else ""
            lines.append(f"unknown key {path}{hint}")
        else:
            lines.append(f"{path}: {item['msg']}, got {item['input']!r}")
    return "; ".join(dict.fromkeys(lines))


def _is_union_member(part: int | str) -> bool:
    text = str(part)
    return text in ("int", "float", "str", "bool", "none") or "[" in text


def parse_config(data: Mapping[str, Any]) -> Config:
    """Validate a nested dict.

    Raises:
      ConfigError: with every wrong key, its value and its bound.
    """
    try:
        return CONFIG_ADAPTER.validate_python(dict(data))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply dotted overrides.

    Raises:
      ConfigError: the file is missing, isn't YAML, or holds wrong keys or values.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read configuration {path}: {error.strerror}") from None
    try:
        data = _numbers(yaml.load(text, _Loader)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold sections such as env:, found {type(data).__name__}")
    return parse_config(_merge(data, parse_overrides(overrides)))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain JSON-able data."""
    data: dict[str, Any] = CONFIG_ADAPTER.dump_python(config, mode="json")
    return data


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as a YAML file's text."""
    return str(yaml.safe_dump(to_dict(config), sort_keys=False))


def config_hash(config: Config, without: Iterable[str] = ()) -> str:
    """Return 16 hex digits over the resolved configuration, less the dotted keys `without`."""
    data = flatten(to_dict(config))
    skip = tuple(without)
    kept = {k: v for k, v in data.items() if not k.startswith(skip)} if skip else data
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
