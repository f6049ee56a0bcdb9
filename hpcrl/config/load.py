"""YAML file and dotted overrides into a `Config`; errors name key, value and bound."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import ValidationError

from hpcrl.config.explain import explain
from hpcrl.config.root import CONFIG_ADAPTER, Config


class ConfigError(ValueError):
    """The configuration can't be used; the message says which key, value and bound."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes 1e-4 for a number, a date for text, and refuses a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            problem = f"key given twice: {', '.join(sorted(twice))}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which `_Loader` or any other loader takes for more than text."""


def _resolve_numbers(cls: Any, *, only: bool) -> None:
    """Numbers need no point or sign before an exponent; with `only` dates and 12:30 are text."""
    old = ("timestamp", "int", "float") if only else ()
    cls.yaml_implicit_resolvers = {
        first: [(tag, regex) for tag, regex in resolvers if tag.rpartition(":")[2] not in old]
        for first, resolvers in cls.yaml_implicit_resolvers.items()
    }
    patterns = {
        "int": r"[-+]?(0|[1-9][\d_]*|0x[0-9a-fA-F_]+)",
        "float": r"[-+]?((\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|\.inf)|\.nan",
    }
    for name, pattern in patterns.items():
        regex = re.compile(f"^({pattern})$")
        cls.add_implicit_resolver(f"tag:yaml.org,2002:{name}", regex, list("-+.0123456789"))


_resolve_numbers(_Loader, only=True)
_resolve_numbers(_Dumper, only=False)


def _parse_yaml(text: str) -> Any:
    """Parse one document.

    Raises:
      ValueError: it isn't YAML; in one line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Turn `--a.b value` and `--a.b=value` into a nested dict; later ones win.

    A value is YAML, but for keys that hold text, whose value is taken as it stands.

    Raises:
      ConfigError: an argument is not an override, or lacks its value.
    """
    tree: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; overrides look like --env.name VALUE")
        path, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{path} lacks a value")
            text = rest.pop(0)
        path = path.replace("-", "_")
        try:
            value: Any = text if path in _TEXT_KEYS or not text else _parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--{path}: value {text!r} is not valid YAML: {error}") from None
        for key in reversed(path.split(".")):
            value = {key: value}
        tree = _merge(tree, value)
    return tree


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def key_types(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Return the type of every key of `cls` by dotted name; a section's is its dataclass."""
    types: dict[str, Any] = {}
    for name, annotation in get_type_hints(cls, include_extras=True).items():
        types[prefix + name] = annotation
        for section in _dataclasses_of(annotation):
            types |= key_types(section, f"{prefix}{name}.")
    return types


def _dataclasses_of(annotation: Any) -> list[Any]:
    """Return the dataclasses that an annotation allows: none, one or a union's."""
    if isinstance(annotation, type):
        return [annotation] if dataclasses.is_dataclass(annotation) else []
    return [found for part in get_args(annotation) for found in _dataclasses_of(part)]


def known_keys() -> list[str]:
    """Dotted names of all keys, sections included."""
    return list(key_types())


_TEXT_KEYS = frozenset(key for key, annotation in key_types().items() if annotation is str)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Validate a nested dict.

    Raises:
      ConfigError: with every wrong key, its value and its bound.
    """
    try:
        return CONFIG_ADAPTER.validate_python(dict(data))
    except ValidationError as error:
        raise ConfigError(explain(error, known_keys())) from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply dotted overrides.

    Raises:
      ConfigError: the file is missing, isn't YAML, or holds wrong keys or values.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"can't read configuration {path}: it is not a text file") from None
    try:
        data = _parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold sections such as env:, found {type(data).__name__}")
    return parse_config(_merge(data, parse_overrides(overrides)))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain JSON-able data."""
    data: dict[str, Any] = CONFIG_ADAPTER.dump_python(config, mode="json")
    return data


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as a YAML file's text, which `load_config` reads back."""
    return str(yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False))


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
