"""The four tensions of docs/choosing-a-layout.md: each metric is written, each knob exists."""

import re
from pathlib import Path

import pytest

from hpcrl.config.load import known_keys
from hpcrl.exit_codes import DONE
from hpcrl.run.metrics import read_metrics
from tests.jobs.test_async_loopback import async_config
from tests.jobs.test_layouts_loopback import run_job
from tests.loopback_job import JobRun
from tests.small import config_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing-a-layout.md"


def table():
    """(tension, names of metrics, names of knobs) of each row."""
    section = PAGE.read_text(encoding="utf-8").split("## Four tensions")[1].split("\n\n")[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()[2:]]
    return [(row[0], *(re.findall(r"`([^`]+)`", cell) for cell in row[1:])) for row in rows]


def test_there_are_four_with_metrics_and_knobs():
    rows = table()
    assert [row[0] for row in rows] == [
        "production against consumption",
        "freshness against utilisation",
        "latency against batch size",
        "samples against wall-clock time",
    ]
    assert all(metrics and knobs for _, metrics, knobs in rows)


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0].replace(" ", "_"))
def test_each_knob_is_a_key_of_the_configuration(row):
    known = known_keys()
    for knob in row[2]:
        assert knob in known or (knob.endswith(".*") and knob.removesuffix(".*") in known), knob


def test_each_metric_is_in_the_records_of_a_run(tmp_path, monkeypatch):
    config = config_of(
        run={"dir": str(tmp_path / "run")},
        stop={"agent_steps": 600},
        env={"options": {"episode_length": 4}},
    )
    run = JobRun(monkeypatch).start(config, 3)
    assert run.codes == [DONE] * 3
    # A layout's name in a row is followed by metrics that its records alone have.
    run_job(monkeypatch, async_config(tmp_path / "async", 1, stop={"agent_steps": 600}))
    records = {"": read_metrics(tmp_path / "run")[-1]}
    records["async_gradient"] = read_metrics(tmp_path / "async")[-1]
    for tension, metrics, _ in table():
        layout = ""
        for name in metrics:
            if name in records:
                layout = name
                continue
            assert records[layout].get(name) is not None, (tension, layout, name)
