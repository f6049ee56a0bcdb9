"""Gymnasium spaces of a recording, from its description; needs gymnasium."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


def observation_space(env: dict[str, Any]) -> spaces.Space[Any]:
    """Return the space of observations as they were recorded, one time step each."""
    tree: dict[str, Any] = {}
    for path, leaf in env["observation"].items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = _leaf_space(leaf)
    return tree["obs"] if list(tree) == ["obs"] else _dict_space(tree)


def _dict_space(tree: dict[str, Any]) -> spaces.Dict:
    return spaces.Dict(
        {name: _dict_space(v) if isinstance(v, dict) else v for name, v in tree.items()}
    )


def _leaf_space(leaf: dict[str, Any]) -> spaces.Space[Any]:
    shape, dtype = tuple(leaf["array"]["shape"]), np.dtype(leaf["array"]["dtype"])
    if leaf["kind"] == "discrete":
        counts = np.array(leaf["nvec"], dtype)
        return spaces.MultiDiscrete(counts.reshape(shape), dtype.type) if shape else _one(counts)
    if leaf["kind"] == "binary":
        return spaces.Box(0, 1, shape, dtype.type)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype.type)


def _one(counts: np.ndarray) -> spaces.Discrete:
    return spaces.Discrete(int(counts[0]))


def action_space(env: dict[str, Any]) -> spaces.Space[Any]:
    """Return the space of the flat action vector; a single category is Discrete."""
    parts = env["action"]["parts"]
    if all(part["kind"] == "discrete" for part in parts):
        counts = [count for part in parts for count in part["nvec"]]
        if len(parts) == 1 and len(counts) == 1:
            return spaces.Discrete(counts[0])
        return spaces.MultiDiscrete(np.array(counts, np.int32), np.int32)
    low: list[float] = []
    high: list[float] = []
    for part in parts:
        box = part["kind"] == "box"
        low += part["low"] if box else [0.0] * len(part["nvec"])
        high += part["high"] if box else [count - 1.0 for count in part["nvec"]]
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)


def registered_spec(config: dict[str, Any]) -> Any:
    """Return gymnasium's spec of the run's environment, None where it isn't registered."""
    family, _, name = str(config.get("env", {}).get("name", "")).partition(":")
    if family != "gym":
        return None
    try:
        spec = copy.deepcopy(gymnasium.spec(name))  # the registry's own must stay as it is
    except gymnasium.error.Error:
        return None
    spec.kwargs.update((config["env"].get("options") or {}).get("kwargs") or {})
    return spec
