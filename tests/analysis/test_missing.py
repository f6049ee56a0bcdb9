"""What is not in a recording is told: writers, starts, segments and episodes."""

import json
import shutil
import tracemalloc

import h5py
import numpy as np
import pytest

from analysis.errors import DataError
from analysis.missing import is_selected
from analysis.reader import Run
from analysis.segments import leaf_datasets
from tests.recording_tools import write_run

RANKS = [
    {"rank": 0, "role": "learner", "index": 0},
    {"rank": 1, "role": "inference", "index": 0},
    {"rank": 2, "role": "inference", "index": 1},
    {"rank": 3, "role": "evaluator", "index": 0},
    {"rank": 4, "role": "actor", "index": 0},
]


def writers(tmp_path, *names, ranks=RANKS):
    """A run in which these writers left a segment each."""
    run = write_run(tmp_path, segments=1)
    template = run / "trajectories" / "inference-0-0"
    template.rename(run / "template")
    for name in names:
        path = shutil.copytree(run / "template", run / "trajectories" / name) / "seg-00000.h5"
        with h5py.File(path, "r+") as file:
            file.attrs["topology"] = json.dumps({"ranks": ranks, "nodes": [{}]})
            file.attrs["restart"] = int(name[-1])
    return run


def notes_of(run):
    opened = Run(run)
    assert opened.segments
    return opened.notes


def test_nothing_is_said_of_a_whole_recording(tmp_path):
    run = writers(tmp_path, "inference-0-0", "inference-1-0", "evaluator-0-0")
    assert notes_of(run) == []


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_a_rank_that_left_no_segment_is_named(tmp_path, left):
    run = writers(tmp_path, "inference-0-0", "evaluator-0-0")
    if left == "an empty folder":
        (run / "trajectories" / "inference-1-0").mkdir()
    (note,) = notes_of(run)
    assert "inference 1 of start 0 has no segment here" in note


def test_a_start_that_left_no_segment_is_named_and_each_start_has_its_own_ranks(tmp_path):
    run = writers(tmp_path, "inference-0-3", "inference-1-3", "evaluator-0-3")
    assert [note.split(" has no")[0].split(": ")[1] for note in notes_of(run)] == [
        "start 0",
        "start 1",
        "start 2",
    ]
    for start in (0, 1, 2):
        path = shutil.copytree(run / "template", run / "trajectories" / f"inference-0-{start}")
        with h5py.File(path / "seg-00000.h5", "r+") as file:
            file.attrs["topology"] = json.dumps({"ranks": RANKS[: 3 if start == 1 else 2]})
    (note,) = notes_of(run)
    assert "inference 1 of start 1 has no segment here" in note


def test_an_older_copy_beside_a_closed_segment_is_not_read_twice(tmp_path):
    """As a repeated copy of a running run leaves it."""
    run = write_run(tmp_path)
    segment = run / "trajectories/inference-0-0/seg-00001.h5"
    shutil.copy(segment, segment.with_name("seg-00001.h5.part"))
    assert len(Run(run).episodes()) == 40
    segment.with_name("seg-00001.h5.part").write_bytes(segment.read_bytes()[:3000])
    assert len(Run(run).episodes()) == 40
    assert notes_of(run) == []


@pytest.mark.parametrize("counts", [(0, 500), (200, 500), (500, 0)])
def test_dropped_episodes_are_told_also_where_no_number_is_missing(tmp_path, counts):
    run = write_run(tmp_path)
    for number, count in enumerate(counts):
        with h5py.File(run / f"trajectories/inference-0-0/seg-0000{number}.h5", "r+") as file:
            file.attrs.modify("dropped_episodes", np.int64(count))
    (note,) = notes_of(run)
    assert "500 were dropped while recording" in note


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_absent_episodes_are_counted_as_by_hand(tmp_path, fraction):
    """Two writers of interleaved environments, some numbers taken away, against sets."""
    run = write_run(tmp_path, segments=1)
    shutil.copytree(run / "trajectories/inference-0-0", run / "trajectories/inference-1-0")
    rng = np.random.default_rng(0)
    absent = 0
    for writer in range(2):
        identities = [(e, n) for e in (writer, 9 + writer) for n in rng.choice(60, 20, False)]
        with h5py.File(run / f"trajectories/inference-{writer}-0/seg-00000.h5", "r+") as file:
            file.attrs["fraction"] = fraction
            file["episodes/env_id"][:], file["episodes/episode"][:] = np.array(identities).T
        for env in {e for e, _ in identities}:
            numbers = {n for e, n in identities if e == env}
            absent += sum(
                n not in numbers and is_selected(env, n, fraction) for n in range(max(numbers))
            )
    (note,) = notes_of(run)
    assert absent > 10
    assert f" {absent} episodes are not in the recording" in note


def test_lines_of_the_index_that_do_not_follow_each_other_are_damage(tmp_path):
    changes = {"length": 0, "start": 21}
    for column, value in changes.items():
        run = write_run(tmp_path, column, segments=1)
        with h5py.File(run / "trajectories/inference-0-0/seg-00000.h5", "r+") as file:
            assert file[f"episodes/{column}"][5] != value
            file[f"episodes/{column}"][5] = value
        with pytest.raises(DataError, match="line 5 of its index is an episode of"):
            Run(run).episodes()


def test_reading_the_index_takes_the_memory_of_its_table(tmp_path):
    """Beside the frame and what the segments keep: two columns and their order."""
    peaks = {}
    for count in (10_000, 210_000):
        run = write_run(tmp_path, str(count), segments=1)
        with h5py.File(run / "trajectories/inference-0-0/seg-00000.h5", "r+") as file:
            for data in leaf_datasets(file["steps"]).values():
                data.resize(count, axis=0)
            for name, data in file["episodes"].items():
                data.resize((count,))
                data[:] = np.arange(count) if name in ("start", "episode") else 1
            file["episodes/final"][:] = -1
            row_bytes = sum(data.dtype.itemsize for data in file["episodes"].values())
        tracemalloc.start()
        assert len(Run(run).episodes()) == count
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    more = (peaks[210_000] - peaks[10_000]) / 200_000
    assert more < 2.6 * row_bytes
