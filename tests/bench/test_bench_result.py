import json

import numpy as np
from click.testing import CliRunner
from PIL import Image

from hpcrl.bench.cli import bench
from hpcrl.bench.result import Chart, Result, Sheet, draw, number, publish


def result(**more):
    return Result(
        "demo", 0.5, "half of it", {"rate": np.float64(2.0), "none": float("nan")}, **more
    )


def test_the_json_file_has_the_headline_as_ratio_and_says_on_what_machine(tmp_path, capsys):
    publish(result(), str(tmp_path / "a.json"))
    data = json.loads((tmp_path / "a.json").read_text())
    assert (data["benchmark"], data["ratio"], data["rate"], data["none"]) == (
        "demo",
        0.5,
        2.0,
        None,
    )
    assert data["machine"]["cores"] >= 1
    assert "ratio 0.500: half of it" in capsys.readouterr().out


def test_every_row_of_a_sheet_is_printed(capsys):
    publish(result(sheets=[Sheet("times", ("what", "ms"), [("a", 1.2345), ("b", None)])]))
    out = capsys.readouterr().out
    assert "times" in out
    assert "1.23" in out
    assert "-" in out


def test_numbers_are_shown_short():
    assert [number(v) for v in (1234.5, 0.012345, 12, "x", None)] == [
        "1,234",
        "0.0123",
        "12",
        "x",
        "-",
    ]


def test_a_picture_has_every_chart(tmp_path):
    lines = Chart("a", "x", "y", {"s": [(1, 1.0), (4, 2.0)], "t": [(1, 2.0)]}, log_x=True, goal=1.5)
    bars = Chart("b", "", "y", {"s": [("one", 1.0), ("two", 2.0)]}, "bars")
    draw([lines], tmp_path / "one.png")
    draw([lines, bars], tmp_path / "two.png")
    heights = [Image.open(tmp_path / name).height for name in ("one.png", "two.png")]
    assert heights[1] == 2 * heights[0]


def test_counts_that_are_none_are_refused_with_the_form_that_is_meant():
    outcome = CliRunner().invoke(bench, ["wire", "--clients", "4,x"])
    assert outcome.exit_code == 2
    assert "such as 4,64,256" in outcome.output
