"""`hpcrl envs`: the families of environments, and what one of them looks like here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import Console
from rich.table import Table

from env_wrappers import EnvBatch, EnvError, make
from env_wrappers.errors import suggestion
from env_wrappers.families import FAMILIES, Family, family_named
from hpcrl.comm.wire import reply_layout, step_layout, step_short_nbytes
from hpcrl.human import format_bytes
from hpcrl.job import ACTOR_STAGES
from hpcrl.specs import ActionSpec, EnvSpec


def print_families() -> None:
    """One row for each family: what it is, whether it is here, how to install it."""
    table = Table(box=None, pad_edge=False)
    for column in ("family", "installed", "an environment", "what"):
        table.add_column(column, overflow="fold")
    for family in FAMILIES:
        example = f"{family.name}:{family.example or 'NAME'}"
        table.add_row(family.key, _installed(family), example, family.about)
    table.add_row("(yours)", "-", "MODULE:FUNCTION", "a function of yours")
    Console(markup=False).print(table)


def print_one(name: str, options: Sequence[str], num_envs: int, seconds: float) -> None:
    """Make an environment, and print its spaces, its bytes on the wire and its rate.

    Args:
      name: of an environment, or the key of a family for its example.
      options: KEY=VALUE each, the value as YAML has it.
      num_envs: environments of the batch.
      seconds: how long to step.

    Raises:
      EnvError: it can't be made.
    """
    family, name = _resolve(name)
    given = dict(family.example_options) if family and name.endswith(family.example) else {}
    given |= _parse(options)
    rows = num_envs * (family.rows_per_env if family else 1)
    batch = make(name, rows, range(rows), given)
    try:
        table = Table(show_header=False, box=None, pad_edge=False)
        for key, value in _facts(name, family, batch, seconds):
            table.add_row(key, value)
        Console(markup=False).print(table)
    finally:
        batch.close()


def stepping_rate(batch: EnvBatch, seconds: float) -> float:
    """Rows per second of a batch that is stepped with random actions, after a short warm-up."""
    rng = np.random.default_rng(0)
    action = EnvSpec.from_json(batch.spec).action
    draws = [random_actions(action, batch.num_envs, rng) for _ in range(64)]
    batch.reset()
    for actions in draws[:8]:
        batch.step(actions)
    steps, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds or steps == 0:
        batch.step(draws[steps % len(draws)])
        steps += 1
    return steps * batch.num_envs / (time.perf_counter() - start_s)


def random_actions(
    action: ActionSpec, rows: int, rng: np.random.Generator
) -> npt.NDArray[np.generic]:
    """Actions `[rows, A]`, uniform over each part; unbounded numbers from -1 to 1."""
    columns: list[npt.NDArray[Any]] = []
    for part in action.parts:
        if part.kind == "discrete":
            columns += [rng.integers(0, count, rows) for count in part.nvec]
        else:
            for low, high in zip(part.low, part.high, strict=True):
                bounds = (low if math.isfinite(low) else -1.0, high if math.isfinite(high) else 1.0)
                columns.append(rng.uniform(*bounds, rows))
    return np.stack(columns, 1).astype(action.dtype)


def _installed(family: Family) -> str:
    versions = family.versions()
    if versions is None:
        return f"no: {family.install_command}"
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "built in"


def _resolve(name: str) -> tuple[Family | None, str]:
    """The family, None for the user's own function, and the full name."""
    if ":" in name:
        return family_named(name.partition(":")[0]), name
    keys = {family.key: family for family in FAMILIES}
    if name not in keys:
        hint = suggestion(name, keys) or f"; there are: {', '.join(keys)}"
        raise EnvError(f"there is no family of environments {name!r}{hint}")
    family = keys[name]
    if not family.example:
        raise EnvError(f"{name} has no environment of its own to look at; {family.about}")
    return family, f"{family.name}:{family.example}"


def _parse(options: Sequence[str]) -> dict[str, Any]:
    parsed = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise EnvError(f"option {option!r} is not KEY=VALUE")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise EnvError(f"option {key}: {value!r} is no YAML value: {error}") from error
    return parsed


def _facts(
    name: str, family: Family | None, batch: EnvBatch, seconds: float
) -> list[tuple[str, str]]:
    spec, rows = EnvSpec.from_json(batch.spec), batch.num_envs
    step, reply = step_layout(spec, rows, len(ACTOR_STAGES)), reply_layout(spec, rows)
    up, down = step_short_nbytes(spec, step) / rows, reply.nbytes / rows
    facts = [("environment", name)]
    if family is not None:
        facts.append(("family", f"{family.about} ({_installed(family)})"))
    for path, leaf in spec.observation.items():
        shape = "x".join(map(str, leaf.seen.shape)) or "scalar"
        form = f"{leaf.kind} {leaf.array.dtype} {shape}"
        form += f", {leaf.stack} stacked" if leaf.stack > 1 else ""
        form += f", {leaf.array.nbytes} bytes as bits" if leaf.bits else ""
        facts.append((f"observes {path}", form))
    for index, part in enumerate(spec.action.parts):
        values = (
            part.nvec if part.kind == "discrete" else tuple(zip(part.low, part.high, strict=True))
        )
        facts.append((f"action part {index}", f"{part.kind} {_shortened(values)}"))
    facts.append(("frames per step", str(spec.frame_skip)))
    facts.append(
        (
            "bytes per step",
            f"{format_bytes(up)} to the inference rank, {format_bytes(down)} back, "
            f"in a group of {rows}",
        )
    )
    rate = stepping_rate(batch, seconds)
    facts.append(("steps per second", f"{rate:,.0f} here, {rows} rows, random actions"))
    if family is not None and family.note:
        facts.append(("note", family.note))
    return facts


def _shortened(values: Sequence[object], most: int = 4) -> str:
    shown = ", ".join(str(value) for value in values[:most])
    return f"[{shown}{', ...' if len(values) > most else ''}] ({len(values)})"
