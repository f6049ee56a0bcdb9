"""Writes the recorded episodes of training as a dataset of another kind: minari, d4rl or robomimic.

All of them want an observation after an episode's last step. A recording has none where the
episode terminated, since no policy sees it: there the last observation is repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from analysis._common import guarded
from analysis.errors import DataError
from analysis.reader import Run

Steps = dict[str, NDArray[Any]]

_LIBVER = ("earliest", "v110")


def episodes_of(run: Run) -> Iterator[tuple[dict[str, Any], Steps]]:
    """Yield every training episode's line of the index and its steps.

    The observations, `observation/<leaf>`, are `[T+1, ...]`.

    Raises:
      DataError: no observations were recorded.
    """
    table = run.training_episodes()
    leaves = [name for name in run.columns if name.startswith("observation/")]
    if not leaves:
        raise DataError(f"{run.path}: recording.fields had no observation: nothing to export")
    for number, entry in zip(table.index.tolist(), table.to_dict("records"), strict=True):
        steps = run.episode(number)
        for name in leaves:
            last = steps.pop(name.replace("observation/", "final/", 1), steps[name][-1])
            steps[name] = np.concatenate([steps[name], last[None]])
        yield entry, steps


def nested(steps: Steps) -> Any:
    """Return the observations as their space has them: one array, or dicts of arrays."""
    tree: dict[str, Any] = {}
    for name, values in steps.items():
        if name.startswith("observation/"):
            *folders, leaf = name.split("/")[1:]
            place = tree
            for folder in folders:
                place = place.setdefault(folder, {})
            place[leaf] = values
    return tree["obs"] if list(tree) == ["obs"] else tree


def action_of(run: Run, actions: NDArray[Any]) -> NDArray[Any]:
    """Return actions `[T, A]` as the action space has them: `[T]` for a single category."""
    parts = run.segments[0].env["action"]["parts"]
    single = len(parts) == 1 and parts[0]["kind"] == "discrete" and len(parts[0]["nvec"]) == 1
    return actions[:, 0].astype(np.int64) if single else actions


def last_of(steps: Steps) -> NDArray[np.bool_]:
    """Return `<bool>[T]`, true at the episode's last step, also where it was interrupted."""
    count = len(steps["reward"])
    last: NDArray[np.bool_] = np.arange(count) == count - 1
    return last


def export_d4rl(run: Run, output: Path) -> None:
    """Write the flat arrays of D4RL; `timeouts` marks every end that is not terminal.

    What describes them is in attributes of the group `metadata`: d4rl.sequence_dataset indexes all
    data sets of a file by step.

    Raises:
      DataError: the observation has several leaves, for which D4RL has no place.
    """
    leaves = [name for name in run.columns if name.startswith("observation/")]
    if len(leaves) != 1:
        raise DataError(
            f"{run.path}: d4rl holds one observation array, here are {len(leaves)}; "
            "choose minari or robomimic"
        )
    with h5py.File(output, "x", libver=_LIBVER, locking=False) as file:
        for _, steps in episodes_of(run):
            observations = steps[leaves[0]]
            rows = {
                "observations": observations[:-1],
                "next_observations": observations[1:],
                "actions": action_of(run, steps["action"]),
                "rewards": steps["reward"],
                "terminals": steps["terminated"],
                "timeouts": last_of(steps) & ~steps["terminated"],
            }
            behaviour = {
                f"infos/{name.rpartition('/')[2]}": values
                for name, values in steps.items()
                if name.startswith("behaviour/")
            }
            for name, values in {**rows, **behaviour}.items():
                append(file, name, values)
        file.create_group("metadata").attrs.update(facts(run))


def append(file: h5py.File, name: str, values: NDArray[Any]) -> None:
    """Append rows to a dataset, which is made at the first; wide rows are compressed."""
    if name not in file:
        row_bytes = max(1, values[0].nbytes)
        chunk = max(1, min(4096, 2**18 // row_bytes))
        file.create_dataset(
            name,
            data=values,
            maxshape=(None, *values.shape[1:]),
            chunks=(chunk, *values.shape[1:]),
            **({"compression": "gzip", "compression_opts": 1} if row_bytes >= 256 else {}),
        )
        return
    dataset = file[name]
    length = len(dataset)
    dataset.resize(length + len(values), axis=0)
    dataset[length:] = values


def export_robomimic(run: Run, output: Path) -> None:
    """Write robomimic's groups, one per episode; every tenth is in the mask `valid`."""
    with h5py.File(output, "x", libver=_LIBVER, locking=False) as file:
        data = file.create_group("data")
        names: list[str] = []
        total = 0
        for _, steps in episodes_of(run):
            demo = data.create_group(f"demo_{len(names)}")
            demo.attrs["num_samples"] = len(steps["reward"])
            demo["actions"] = steps["action"]
            demo["rewards"] = steps["reward"]
            demo["dones"] = last_of(steps).astype(np.int64)
            for name, values in steps.items():
                if name.startswith("observation/"):
                    leaf = name.removeprefix("observation/").replace("/", "_")
                    wide = values[0].nbytes >= 256
                    filters = {"compression": "gzip", "compression_opts": 1} if wide else {}
                    demo.create_dataset(f"obs/{leaf}", data=values[:-1], **filters)
                    demo.create_dataset(f"next_obs/{leaf}", data=values[1:], **filters)
            total += len(steps["reward"])
            names.append(f"demo_{len(names)}")
        data.attrs["total"] = total
        data.attrs["env_args"] = json.dumps(environment_arguments(run))
        valid = names[9::10]
        file["mask/train"] = np.array([name for name in names if name not in valid], "S")
        file["mask/valid"] = np.array(valid, "S")


def environment_arguments(run: Run) -> dict[str, Any]:
    """Return what robomimic makes an environment of: by gym's name and arguments where it has one.

    2 is its number for environments of gym.
    """
    section = run.config.get("env", {})
    family, _, name = run.env_name.partition(":")
    kwargs = (section.get("options") or {}).get("kwargs") or {} if family == "gym" else {}
    return {
        "env_name": name if family == "gym" else run.env_name,
        "type": 2,
        "env_kwargs": kwargs,
    }


def facts(run: Run) -> dict[str, Any]:
    """Return what describes the recording, for metadata."""
    attributes = run.segments[0].attributes
    names = ("env_name", "config", "config_hash", "seed", "code_version", "fraction")
    return {name: _plain(attributes[name]) for name in names}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def export_minari(run: Run, output: Path) -> None:
    """Write a Minari dataset; images are kept exactly (not as JPEG, its default).

    Raises:
      DataError: the package is missing.
    """
    try:
        from minari import __version__ as version
        from minari.data_collector import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage
    except ImportError:
        raise DataError("format minari needs its package: pip install 'minari[hdf5]'") from None
    from analysis.spaces import action_space, observation_space, registered_spec

    env = run.segments[0].env
    output.mkdir()
    storage = MinariStorage.new(
        output / "data",
        observation_space(env),
        action_space(env),
        registered_spec(run.config),
        "hdf5",
        jpeg_encoding=False,
    )

    def buffers() -> Iterator[EpisodeBuffer]:  # which must end terminated or truncated
        for number, (_, steps) in enumerate(episodes_of(run)):
            behaviour = {n.rpartition("/")[2]: v for n, v in steps.items() if "behaviour/" in n}
            yield EpisodeBuffer(
                id=number,
                observations=nested(steps),
                actions=action_of(run, steps["action"]),
                rewards=steps["reward"],
                terminations=steps["terminated"],
                truncations=last_of(steps) & ~steps["terminated"],
                infos=behaviour or None,
            )

    storage.update_episodes(buffers())
    known = {name: value for name, value in facts(run).items() if name != "config"}
    storage.update_metadata(
        {
            "dataset_id": f"hpcrl/{run.name}-v0",
            "minari_version": version,
            "algorithm_name": str(run.config.get("agent", {}).get("name", "")),
            "description": json.dumps(known),
        }
    )


EXPORTERS: dict[str, Callable[[Run, Path], None]] = {
    "minari": export_minari,
    "d4rl": export_d4rl,
    "robomimic": export_robomimic,
}


def export(run: Run, kind: str, output: Path) -> int:
    """Write the recording as `kind` to a new file (minari: directory); return its episodes.

    Raises:
      DataError: the output exists, or the recording can't be exported.
    """
    if output.exists():
        raise DataError(f"{output} exists; nothing is written over")
    count = len(run.training_episodes())
    partial = output.with_name(output.name + ".part")
    if partial.exists():
        raise DataError(f"{partial} is left from an export that was killed: remove it first")
    try:
        EXPORTERS[kind](run, partial)
        partial.rename(output)
    except OSError as error:
        raise DataError(f"{output} can't be written: {error}") from None
    finally:
        if partial.is_dir():  # after an error; else it has its name already
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Export one run."""
    parser = argparse.ArgumentParser("python -m analysis.export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--format", choices=EXPORTERS, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, help="must not exist")
    parser.add_argument("--partial", action="store_true", help="use what can be read")
    options = parser.parse_args(arguments)

    def act() -> None:
        run = Run(options.run, options.partial)
        count = export(run, options.format, options.output)
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
        apart = len(run.episodes()) - count
        if apart:
            print(f"note: {apart} episodes of evaluation are left out", file=sys.stderr)
        print(f"{options.output}: {count} episodes as {options.format}")

    return guarded("export", act)


if __name__ == "__main__":
    sys.exit(main())
