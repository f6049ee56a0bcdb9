"""What a benchmark gives: tables for the terminal, figures for a JSON file, a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from hpcrl.durable import atomic_write, json_text


@dataclass(frozen=True)
class Sheet:
    """A table: the first column is text, the others are numbers or text that is shown as it is."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Chart:
    """A picture of some series.

    Attributes:
      title: above the picture.
      x_label: with its unit.
      y_label: with its unit.
      series: points `(x, y)` by name; of bars, x is text.
      kind: lines over numbers, or bars over text.
      log_x: whether x grows by factors.
      goal: a level to draw across, None for none.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[Any, float]]]
    kind: Literal["lines", "bars"] = "lines"
    log_x: bool = False
    goal: float | None = None


@dataclass(frozen=True)
class Result:
    """The outcome of one benchmark.

    Attributes:
      name: of the benchmark.
      ratio: the headline.
      meaning: of the ratio, in a clause.
      figures: everything else, as JSON.
      sheets: for the terminal.
      charts: for the picture, one above the other.
    """

    name: str
    ratio: float
    meaning: str
    figures: Mapping[str, Any]
    sheets: Sequence[Sheet] = ()
    charts: Sequence[Chart] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        head = {"benchmark": self.name, "ratio": self.ratio, "meaning": self.meaning}
        return {**head, **self.figures, "machine": machine()}


def machine() -> dict[str, Any]:
    """Return what the figures depend on and no configuration says."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def publish(result: Result, json_path: str | None = None, png_path: str | None = None) -> None:
    """Print the tables and the headline; write the files that are asked for."""
    console = Console()
    for sheet in result.sheets:
        console.print(_table(sheet))
    console.print(f"ratio {result.ratio:.3f}: {result.meaning}")
    if json_path:
        data = json.loads(json_text(result.to_json()))
        atomic_write(Path(json_path), json.dumps(data, indent=2) + "\n")
    if png_path:
        draw(result.charts, Path(png_path))


def _table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left")
    for index, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in sheet.rows:
        table.add_row(*map(number, row))
    return table


def number(value: Any) -> str:
    """Return a figure with about three significant digits; text as it is, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Write a PNG of the charts, one above the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4 * max(len(charts), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(len(charts), 1), 1, squeeze=False)[:, 0]
    for index, chart in enumerate(charts):
        _draw(axes[index], chart)
    figure.savefig(path, dpi=110, format="png")


def _draw(axis: Any, chart: Chart) -> None:
    for index, (name, points) in enumerate(chart.series.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if chart.kind == "bars":
            width = 0.8 / len(chart.series)
            axis.bar([i + index * width for i in range(len(xs))], ys, width, label=name)
            axis.set_xticks(range(len(xs)), xs, rotation=30, ha="right")
        else:
            axis.plot(xs, ys, marker="o", label=name)
    if chart.log_x:
        axis.set_xscale("log", base=2)
    if chart.goal is not None:
        axis.axhline(chart.goal, linestyle="--", color="grey", label="goal")
    axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axis.grid(alpha=0.3)
    if len(chart.series) > 1 or chart.goal is not None:
        axis.legend()
