"""Makes RUN/trajectories/index.h5, one file in which all segments look like one.

Its /steps are virtual datasets over the segments, by paths relative to the index, so a run can
be moved or copied whole; any tool with HDF5 1.10 or newer reads them. Only closed segments are in
it. HDF5 gives zeros where a segment is missing: /sources lists the segments and their bytes, to be
checked first (`--check`, `missing_sources`). The index is made after the run, and made again after
a restart.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import h5py
import numpy as np

from analysis._common import add_run_arguments, guarded
from analysis.errors import DataError
from analysis.reader import Run
from analysis.segments import FORMAT, SCHEMA_VERSION, Segment, joined_index

INDEX = "index.h5"


def build_index(run: Run) -> Path:
    """Write the index of a run's closed segments, replacing an older index.

    Open segments are left out, and noted: HDF5 doesn't open them through an index.

    Raises:
      DataError: there are no closed segments, they differ in their columns, or it can't be written;
        or as `Run.episodes`.
    """
    run.episodes()
    segments = [segment for segment in run.segments if segment.num_steps and segment.finished]
    if not segments:
        raise DataError(f"{run.path}: no segment is closed yet, so there is nothing to index")
    for segment in segments:
        if segment.columns != segments[0].columns or segment.env != segments[0].env:
            raise DataError(
                f"{segment.path} has other columns or another environment than "
                f"{segments[0].path}: they can't be indexed together"
            )
    run.notes += [
        f"{segment.path} is not in the index, which shows closed segments only"
        for segment in run.segments
        if not segment.finished
    ]
    path = run.path / "trajectories" / INDEX
    partial = path.with_name(f".{INDEX}.tmp")
    try:
        with h5py.File(partial, "w", libver=("v110", "v110"), locking=False) as file:
            _write(file, segments, path.parent)
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"{path} can't be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)  # after an error; else it has its name already
    return path


def _write(file: h5py.File, segments: list[Segment], folder: Path) -> None:
    first = segments[0]
    for name in ("env", "env_name", "config", "config_hash", "seed", "code_version"):
        file.attrs[name] = first.attributes[name]
    file.attrs.update({"format": f"{FORMAT}-index", "schema_version": SCHEMA_VERSION})
    relative = [segment.path.relative_to(folder).as_posix() for segment in segments]
    total = sum(segment.num_steps for segment in segments)
    for column, (shape, dtype) in first.columns.items():
        layout = h5py.VirtualLayout((total, *shape), dtype)
        begin = 0
        for segment, name in zip(segments, relative, strict=True):
            rows = segment.num_steps
            source = h5py.VirtualSource(name, f"steps/{column}", (rows, *shape), dtype)
            layout[begin : begin + rows] = source
            begin += rows
        file.create_virtual_dataset(f"steps/{column}", layout)
    counts = [len(segment.index["start"]) for segment in segments]
    for column, values in joined_index(segments).items():
        file[f"episodes/{column}"] = values
    file["episodes/source"] = np.repeat(np.arange(len(segments)), counts)
    file["sources/path"] = np.array(relative, dtype="S")
    file["sources/bytes"] = np.array([segment.path.stat().st_size for segment in segments])
    file["sources/steps"] = np.array([segment.num_steps for segment in segments])
    file["sources/episodes"] = np.array(counts)


def missing_sources(index: Path) -> list[str]:
    """Return what is wrong with the segments behind an index: missing, changed, or unreadable.

    Raises:
      DataError: the index can't be read.
    """
    try:
        with h5py.File(index, "r", locking=False) as file:
            names = [name.decode() for name in file["sources/path"][:]]
            sizes = file["sources/bytes"][:].tolist()
    except (OSError, KeyError) as error:
        raise DataError(f"{index} is no index of trajectories: {error}") from None
    problems = []
    for name, size in zip(names, sizes, strict=True):
        path = index.parent / name
        if not path.exists():
            problems.append(f"{path} is missing: its steps read as zeros through {index.name}")
        elif path.stat().st_size != size:
            problems.append(f"{path} has changed since {index.name} was made: make it again")
        else:
            problems += _unreadable(path)
    return problems


def _unreadable(path: Path) -> list[str]:
    """Return why HDF5 won't open a segment through an index, if it won't."""
    try:
        h5py.File(path, "r", locking=False).close()
    except OSError as error:
        return [f"{path} can't be read through an index: {error}"]
    return []


def check(index: Path) -> None:
    """Print how many segments are behind an index.

    Raises:
      DataError: one is missing or has changed, or the index is missing or can't be read.
    """
    if not index.exists():
        raise DataError(f"{index} is missing: hpcrl index RUN makes it")
    problems = missing_sources(index)
    if problems:
        raise DataError("\n".join(problems))
    with h5py.File(index, "r", locking=False) as file:
        print(f"{index}: all of its {len(file['sources/path'])} segments are there")


def main(arguments: list[str] | None = None) -> int:
    """Make the indices of all runs."""
    parser = argparse.ArgumentParser("python -m analysis.index", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="make nothing; say whether all that an index shows is there",
    )
    options = parser.parse_args(arguments)

    def act() -> None:
        for path in options.runs:
            if options.check:
                check(path / "trajectories" / INDEX)
                continue
            run = Run(path, options.partial)
            index = build_index(run)
            for note in run.notes:
                print(f"note: {note}", file=sys.stderr)
            with h5py.File(index, "r", locking=False) as file:
                episodes, sources = len(file["episodes/start"]), len(file["sources/path"])
            print(f"{index}: {episodes} episodes in {sources} segments")

    return guarded("index", act)


if __name__ == "__main__":
    sys.exit(main())
