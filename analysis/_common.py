"""What all scripts share: arguments, results, output that overwrites nothing, exit codes."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from analysis.errors import DataError
from analysis.reader import Run, open_runs

FORMATS = ("png", "csv", "parquet", "json")
USAGE = 2

Options = argparse.Namespace


class Result(NamedTuple):
    """What a script found.

    Attributes:
      table: the numbers.
      figure: the picture, None where the question has none.
      notes: what the reader should know of them.
    """

    table: pd.DataFrame
    figure: Figure | None = None
    notes: Sequence[str] = ()


Analyse = Callable[[list[Run], Options], Result]


def command(
    name: str,
    description: str | None,
    analyse: Analyse,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a script; return its exit code: 0, or 2 where input or output can't be used."""
    parser = argparse.ArgumentParser(f"python -m analysis.{name}", description=description)
    add_run_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, help="file to write; it must not exist")
    parser.add_argument(
        "--format", choices=FORMATS, help="of the output; by default what its name ends in"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    return guarded(name, lambda: _answer(name, analyse, options))


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN and what says how runs are read."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="use what can be read of damaged or unfinished recordings",
    )


def guarded(name: str, act: Callable[[], None]) -> int:
    """Return the exit code of `act`, after printing what it raises for the user."""
    try:
        act()
    except DataError as error:
        print(f"analysis.{name}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def _answer(name: str, analyse: Analyse, options: Options) -> None:
    if options.output and options.output.exists():
        raise DataError(f"{options.output} exists; nothing is written over")
    runs = open_runs(options.runs, options.partial)
    result = analyse(runs, options)
    notes = [note for run in runs for note in run.notes] + list(result.notes)
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    emit(result, options.output, options.format, name)


def emit(result: Result, output: Path | None, kind: str | None, name: str) -> None:
    """Write the result to `output`, or the table to standard output.

    Raises:
      DataError: the format can't be had, or the output can't be written.
    """
    if output is None and kind is None:
        with pd.option_context("display.width", 160, "display.max_columns", 40):
            print(result.table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
        return
    kind = kind or output_format(output)
    data = encode(result, kind)
    if output is None and kind in ("csv", "json"):
        sys.stdout.write(data.decode())
        return
    write_new(output or Path(f"{name}.{kind}"), data)


def output_format(output: Path | None) -> str:
    """Return the format that a file's name asks for."""
    kind = output.suffix.removeprefix(".") if output else ""
    if kind not in FORMATS:
        raise DataError(f"{output}: end its name in .{', .'.join(FORMATS)}, or give --format")
    return kind


def encode(result: Result, kind: str) -> bytes:
    """Return the table or the picture as the bytes of a file."""
    buffer = io.BytesIO()
    if kind == "png":
        if result.figure is None:
            raise DataError("there is no picture of this; choose csv, parquet or json")
        result.figure.savefig(buffer, format="png", dpi=110)
    elif kind == "csv":
        result.table.to_csv(buffer, index=False)
    elif kind == "json":
        result.table.to_json(buffer, orient="records", indent=1)
    else:
        try:
            result.table.to_parquet(buffer, index=False)
        except ImportError:
            raise DataError("format parquet needs pyarrow: pip install 'hpcrl[parquet]'") from None
    return buffer.getvalue()


def write_new(path: Path, data: bytes) -> None:
    """Create a file.

    Raises:
      DataError: it exists, or can't be written.
    """
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise DataError(f"{path} exists; nothing is written over") from None
    except OSError as error:
        raise DataError(f"{path} can't be written: {error.strerror}") from None
    print(f"wrote {path}", file=sys.stderr)


def new_figure(columns: int = 1, rows: int = 1, height: float = 3.8) -> tuple[Figure, list[Any]]:
    """Return a figure and its axes in reading order, made without pyplot or a display."""
    figure = Figure(figsize=(max(6.4, 4.6 * columns), height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel():
        axis.grid(alpha=0.3)
    return figure, list(axes.ravel())


def figures_of(metrics: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return those of `names` that a run has reported at least once."""
    return [name for name in names if name in metrics and metrics[name].notna().any()]
