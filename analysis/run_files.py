"""The files of a run beside its recording: configuration, status, topology and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.errors import DataError

_SECTIONS = ("run", "env", "agent")


def parse_config(source: Path, text: bytes) -> dict[str, Any]:
    """Return a configuration as it stands in a file.

    Args:
      source: of the text, for the message.
      text: YAML.

    Raises:
      DataError: it is no YAML, or not whole.
    """
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{source} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise DataError(f"{source} is damaged: it holds {config!r:.40}, not a configuration")
    for name in _SECTIONS:
        if not isinstance(config.get(name, {}), dict):
            raise DataError(f"{source} is damaged: its section {name} is {config[name]!r:.40}")
    if not isinstance(config.get("env", {}).get("name"), str):
        raise DataError(f"{source} is damaged: it has no env.name")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no such file.

    Raises:
      DataError: it can't be read, or holds no object.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise DataError(f"{path} is damaged: it holds {data!r:.40}, not an object")
    return data


def read_metrics(path: Path) -> pd.DataFrame:
    """Return one row per record of metrics.jsonl; a last line that was cut is passed over.

    Raises:
      DataError: the file is missing or holds no record, or another line is none.
    """
    if not path.exists():
        raise DataError(f"{path} is missing: the run has reported nothing, or was not copied")
    records = []
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise DataError(f"{path}: line {number} is no JSON object with wall_time_s")
    if not records:
        raise DataError(f"{path} holds no record yet")
    return pd.DataFrame(records)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("wall_time_s"), int | float)
    return record if is_record else None


def node_hours(metrics: pd.DataFrame, nodes: Mapping[int, int], otherwise: int) -> np.ndarray:
    """Return the node-hours by each record, `<float64>[n]`: every start's time on its own nodes.

    Args:
      metrics: records with `wall_time_s`, over all starts, and `restart`.
      nodes: of each start that is known.
      otherwise: nodes of the other starts.
    """
    seconds = metrics["wall_time_s"].to_numpy(np.float64)
    spent = np.diff(seconds, prepend=0.0)
    used = [nodes.get(restart, otherwise) for restart in starts(metrics).tolist()]
    return np.cumsum(spent * np.array(used)) / 3600


def starts(metrics: pd.DataFrame) -> pd.Series:
    """Return the number of the start that wrote each record; 0 where it doesn't tell."""
    if "restart" not in metrics:
        return pd.Series(0, metrics.index)
    return metrics["restart"].ffill().fillna(0).astype(int)
