"""One file over all segments: what it shows, and what `--check` says of it."""

import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from analysis import index
from analysis.reader import Run
from hpcrl.cli import main as hpcrl
from tests.analysis.killed import NAME, killed_recorder
from tests.recording_tools import IMAGES, write_run

READ = """
import h5py, sys
with h5py.File(sys.argv[1], "r", locking=False) as file:
    print(len(file["steps/reward"]), file["steps/reward"][:].sum(), file["steps/action"][:].shape)
"""


def test_the_index_shows_all_segments_and_notices_a_missing_one(tmp_path, capsys):
    path = write_run(tmp_path, segments=3)
    assert index.main([str(path)]) == 0
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    made = moved / "trajectories" / "index.h5"
    run = Run(moved)
    with h5py.File(made, "r", locking=False) as file:
        np.testing.assert_array_equal(file["steps/reward"][:], run.steps("reward")[:])
        np.testing.assert_array_equal(
            file["steps/observation/obs"][60:80], run.steps("observation/obs")[60:80]
        )
        np.testing.assert_array_equal(file["episodes/start"][:], run.episodes()["start"])
    assert index.main([str(moved), "--check"]) == 0
    assert "all of its 3 segments are there" in capsys.readouterr().out
    run.close()
    (moved / "trajectories/inference-0-0/seg-00001.h5").unlink()
    before = made.read_bytes()
    assert index.main([str(moved), "--check"]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert "seg-00001.h5 is missing" in problem
    assert made.read_bytes() == before


@pytest.fixture(scope="module")
def open_segment(tmp_path_factory):
    """The bytes of a killed recorder's segment."""
    return killed_recorder(tmp_path_factory.mktemp("killed"), 300).read_bytes()


def beside(tmp_path, data):
    """A run of one closed segment and an open one."""
    run = write_run(tmp_path, env=IMAGES, segments=1)
    (run / NAME).parent.mkdir()
    (run / NAME).write_bytes(data)
    return run


def test_open_segments_are_not_in_the_index_and_any_tool_reads_what_is(
    tmp_path, capsys, open_segment
):
    run = beside(tmp_path, open_segment)
    assert index.main([str(run)]) == 2
    assert "still being written" in capsys.readouterr().err
    assert index.main([str(run), "--partial"]) == 0
    said = capsys.readouterr()
    assert "40 episodes in 1 segments" in said.out
    assert f"{run / NAME} is not in the index, which shows closed segments only" in said.err
    made = str(run / "trajectories" / "index.h5")
    read = subprocess.run([sys.executable, "-c", READ, made], capture_output=True, text=True)
    assert read.stdout.split(maxsplit=2) == ["200", "200.0", "(200, 1)\n"], read.stderr
    assert index.main([str(run), "--check"]) == 0


def test_of_open_segments_alone_no_index_is_made(tmp_path, capsys, open_segment):
    run = beside(tmp_path, open_segment)
    shutil.rmtree(run / "trajectories" / "inference-0-0")
    assert index.main([str(run), "--partial"]) == 2
    assert "no segment is closed yet" in capsys.readouterr().err
    assert not (run / "trajectories" / "index.h5").exists()


def changed(segment, open_segment):
    with h5py.File(segment, "r+") as file:
        file["more"] = np.zeros(10000)


def of_a_writer(segment, open_segment):
    """As long as it was, and marked as being written."""
    size = segment.stat().st_size
    segment.write_bytes(open_segment[:size].ljust(size, b"\0"))


def of_another_kind(segment, open_segment):
    segment.write_bytes(b"x" * segment.stat().st_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed, "has changed since index.h5 was made"),
        (of_a_writer, "can't be read through an index"),
        (of_another_kind, "can't be read through an index"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_notices_a_segment_that_is_not_what_it_was(
    tmp_path, capsys, open_segment, change, message
):
    run = write_run(tmp_path)
    assert index.main([str(run), "--check"]) == 2
    assert "hpcrl index RUN makes it" in capsys.readouterr().err
    assert index.main([str(run)]) == 0
    change(run / "trajectories/inference-0-0/seg-00001.h5", open_segment)
    assert index.main([str(run), "--check"]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert "seg-00001.h5" in problem
    assert message in problem


def test_the_commands_of_hpcrl_make_and_check_the_index_and_export(tmp_path, open_segment):
    run = beside(tmp_path, open_segment)

    def command(*words):
        return CliRunner().invoke(hpcrl, [str(word) for word in words]).exit_code

    output = tmp_path / "set.hdf5"
    assert command("index", run) == command("index", run, "--check") == 2
    assert not (run / "trajectories" / "index.h5").exists()
    assert command("index", run, "--partial") == command("index", run, "--check") == 0
    assert command("export", run, "--format", "d4rl", "-o", output) == 2
    assert not output.exists()
    assert command("export", run, "--format", "d4rl", "-o", output, "--partial") == 0
    steps = int(Run(run, partial=True).episodes()["length"].sum())
    with h5py.File(output) as file:
        assert len(file["rewards"]) == steps > 200
    before = output.read_bytes()
    assert command("export", run, "--format", "d4rl", "-o", output, "--partial") == 2
    assert output.read_bytes() == before
    assert command("export", run, "--format", "parquet", "-o", tmp_path / "x") == 2
