"""A writer that is killed, at whatever moment: what was flushed is read, the rest is told."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from analysis import segments as reading
from analysis.errors import DataError
from analysis.reader import Run
from tests.recording.killed_writer import EPISODES, RANDOM_EPISODES, RANDOM_KILLS, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run_writer(root, *arguments, **environment):
    """Run `killed_writer.py`; return what its writers were told, lines by kill."""
    root.mkdir()
    command = [sys.executable, HERE / "killed_writer.py", root, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    subprocess.run(command, check=True, env=environment)
    return {int(path.stem): path.read_bytes().split(b"\n")[:-1] for path in root.glob("*.txt")}


def check_frames(segment, first_episode):
    """Assert that all whole episodes are exactly as written; return how many."""
    count = len(segment.index["start"])
    lengths = [3 + (first_episode + i) % 5 for i in range(count)]
    assert segment.index["length"].tolist() == lengths
    frames = segment.read("observation/obs", 0, segment.num_steps)
    values = [first_episode + i + step for i in range(count) for step in range(lengths[i])]
    assert np.array_equal(frames[:, 3, 5], np.array(values).astype(np.uint8))
    assert (frames == frames[:, :1, :1]).all()
    segment.close()
    return count


def test_a_kill_before_any_file_operation_loses_nothing_that_was_flushed(tmp_path):
    library = tmp_path / "kill_points.so"
    build = ["g++", "-xc", "-shared", "-fPIC", "-o", library, HERE / "kill_points.c", "-ldl"]
    subprocess.run(build, check=True)
    root = tmp_path / "killed"
    told = run_writer(root, LD_PRELOAD=str(library))
    assert len(told) > 100  # the last of them was not killed
    ends = []
    for operation in sorted(told):
        lines = told[operation]
        files = list((root / f"inference-0-{operation}").iterdir())
        if not lines and [path.suffix for path in files] in ([], [".tmp"]):
            continue  # killed while it was being made: it held nothing
        (path,) = files
        segment = reading.load_segment(path)
        if lines and lines[-1] != b"closed":
            _, episodes, steps = lines[-1].split()
            assert len(segment.index["start"]) >= int(episodes)
            assert segment.num_steps + segment.unindexed_steps >= int(steps)
        check_frames(segment, 0)
        ends.append((path.suffix, segment.finished, segment.end, len(segment.index["start"])))
    assert (".part", False, "", 0) in ends
    assert (".part", False, "", EPISODES) in ends
    assert (".part", False, "finished", EPISODES) in ends
    assert ends[-1] == (".h5", True, "finished", EPISODES)


def test_kills_at_random_times_lose_nothing_that_was_flushed(tmp_path):
    root = tmp_path / "killed"
    told = run_writer(root, str(int(time.time())))
    assert len(told) == RANDOM_KILLS
    counts = [recovered(root / f"inference-0-{k}", lines) for k, lines in told.items()]
    assert max(counts) > RANDOM_EPISODES  # some kills came after a rotation


def recovered(folder, lines):
    """Check what a killed writer left; return its number of episodes."""
    closed = lines.count(b"closed")
    name, flushed, _ = next(line for line in reversed(lines) if line != b"closed").split()
    paths = [path for path in sorted(folder.iterdir()) if path.suffix != ".tmp"]
    episodes = 0
    for number, path in enumerate(paths):
        count = check_frames(reading.load_segment(path), episodes)
        assert count == RANDOM_EPISODES or number >= closed
        assert count >= int(flushed) or path.name[:9] != name.decode()
        episodes += count
    assert closed <= len(paths) <= closed + 1
    return episodes


def test_a_writer_killed_between_two_segments_leaves_no_silent_gap(tmp_path):
    folder = tmp_path / "trajectories" / "inference-0-0"
    folder.mkdir(parents=True)
    write(folder / "seg-00000.h5", 0, 10, "followed")
    with pytest.raises(DataError, match="is followed by another segment"):
        Run(tmp_path).episodes()
    run = Run(tmp_path, partial=True)
    assert len(run.episodes()) == 10
    assert "is followed by another segment" in run.notes[0]
    write(folder / "seg-00001.h5", 10, 10, "finished")
    assert len(Run(tmp_path).episodes()) == 20


@pytest.mark.parametrize("moment", ["before it is opened", "before its steps are read"])
def test_a_segment_that_is_closed_meanwhile_is_found_by_its_new_name(tmp_path, moment):
    folder = tmp_path / "inference-0-0"
    folder.mkdir()
    closed, listed = folder / "seg-00000.h5", folder / "seg-00000.h5.part"
    write(closed, 0, 10, "finished")
    if moment == "before its steps are read":
        closed.rename(listed)
    segment = reading.load_segment(listed)
    if moment == "before its steps are read":
        assert not segment.finished
        listed.rename(closed)
    else:
        assert (segment.path, segment.finished) == (closed, True)
    assert check_frames(segment, 0) == 10
