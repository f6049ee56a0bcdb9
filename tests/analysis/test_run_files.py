"""The files beside a recording: damaged, missing, and of a run that was resumed."""

import json

import h5py
import numpy as np
import pytest

from analysis import actions, compare, episodes, lag, learning_curve, report, scaling, throughput
from analysis import export as exporting
from analysis._common import command
from analysis.reader import Run
from tests.recording_tools import write_run

SCRIPTS = (actions, compare, episodes, lag, learning_curve, scaling, throughput)


def codes(run, out):
    """Exit codes of all scripts that read these files."""
    found = set()
    for module in SCRIPTS:
        options = getattr(module, "add_options", lambda parser: None)
        runs = [str(run)] * (2 if module is compare else 1)
        found.add(command("x", None, module.analyse, options, [*runs, "--format", "json"]))
    found.add(report.main([str(run), "-o", str(out / "report.html")]))
    for kind in exporting.EXPORTERS:
        words = [str(run), "--format", kind, "-o", str(out / kind)]
        found.add(exporting.main(words))
    return found


CONTENTS = {
    "config.yaml": [b"\xff\xfe\x00bad", b"", b"7", b"run:\n", b"env:\n", b"agent: 3\n", b"env: {"],
    "STATUS.json": [b"", b"[]", b"null", b"\xff", b'{"state": '],
    "topology.json": [b"", b"[]", b"\xff"],
    "metrics.jsonl": [b"", b"7\n7\n", b"\xff\n\xff\n", b"{}\n{}\n", b'{"wall_time_s": null}\n'],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, all_ in CONTENTS.items() for content in all_]
)
def test_a_damaged_file_ends_no_script_in_a_traceback(tmp_path, capsys, name, content):
    run = write_run(tmp_path)
    (run / name).write_bytes(content)
    assert 2 in codes(run, tmp_path) <= {0, 2}
    assert str(run / name) in capsys.readouterr().err


def test_files_cut_at_any_byte_end_no_script_in_a_traceback(tmp_path):
    run = write_run(tmp_path, records=3)
    for name in CONTENTS:
        whole = (run / name).read_bytes()
        for size in np.linspace(0, len(whole) - 1, 5).astype(int).tolist():
            (run / name).write_bytes(whole[:size])
            assert report.main([str(run), "-o", str(tmp_path / f"{name}-{size}.html")]) in (0, 2)
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("state", ["open", "damaged", "missing"])
def test_without_config_yaml_what_needs_only_metrics_runs_in_any_state_of_the_recording(
    tmp_path, state
):
    run = write_run(tmp_path)
    (run / "config.yaml").unlink()
    segment = run / "trajectories/inference-0-0/seg-00000.h5"
    if state == "open":
        segment.rename(segment.with_name(segment.name + ".part"))
    elif state == "damaged":
        segment.write_bytes(b"damaged")
    else:
        segment.unlink()
    for module in (learning_curve, throughput, scaling):
        options = getattr(module, "add_options", lambda parser: None)
        assert command("x", None, module.analyse, options, [str(run), "--format", "json"]) == 0
    assert Run(run).env_name == "synthetic:counting"


def resumed(tmp_path, nodes):
    """10 h and then 1 h of another start; topology.json has one node."""
    run = write_run(tmp_path)
    hours = [(0, 5.0), (0, 10.0), (1, 11.0)]
    records = [{"restart": r, "frames": int(h), "wall_time_s": h * 3600} for r, h in hours]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for number, count in enumerate(nodes):
        with h5py.File(run / f"trajectories/inference-0-0/seg-0000{number}.h5", "r+") as file:
            file.attrs["restart"] = number
            file.attrs["topology"] = json.dumps({"nodes": [{}] * count})
    return Run(run)


def test_node_hours_count_each_start_on_its_own_nodes(tmp_path):
    run = resumed(tmp_path, nodes=(4, 1))
    assert run.metrics()["node_hours"].tolist() == [20.0, 40.0, 41.0]
    assert run.notes == []


def test_where_nothing_tells_the_nodes_of_a_start_that_is_said(tmp_path):
    run = resumed(tmp_path, nodes=())
    assert run.metrics()["node_hours"].tolist() == [5.0, 10.0, 11.0]
    run.metrics()
    (note,) = run.notes
    assert "nothing tells how many nodes start 0 had: node-hours count 1" in note
