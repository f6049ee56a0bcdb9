"""Segments of a recorder that was killed or is at work, whole and cut at any byte."""

import signal

import h5py
import numpy as np
import pytest

from analysis import actions, episodes, export, index, report, video
from analysis._common import command
from analysis.errors import DataError
from analysis.open_segments import ClosedView, checksum, closed_superblock
from analysis.reader import Run
from analysis.segments import load_segment
from tests.analysis.killed import NAME, killed_recorder, start_recorder
from tests.analysis.killed_recorder import expected
from tests.recording_tools import IMAGES, write_run

FLUSHED = 1200  # more than one chunk of the episode index
KINDS = ("csv", "png", "html", "gif", "hdf5")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run directory that holds nothing but the open segment of a killed recorder."""
    run = tmp_path_factory.mktemp("killed")
    killed_recorder(run, FLUSHED)
    return run


def check_episodes(path):
    """Assert that all that can be read was recorded just so; return how many episodes."""
    run = Run(path, partial=True)
    table = run.episodes()
    assert not table.duplicated(["env_id", "episode"]).any()
    frames, rewards = run.steps("observation/obs")[:], run.steps("reward")[:]
    assert len(frames) == len(rewards) == table["length"].sum()
    for row, entry in enumerate(table.to_dict("records")):
        own = slice(entry["start"], entry["start"] + entry["length"])
        wanted_frames, wanted_rewards, final = expected(entry["env_id"], entry["episode"])
        np.testing.assert_array_equal(frames[own], wanted_frames)
        np.testing.assert_array_equal(rewards[own], wanted_rewards)
        assert entry["return"] == wanted_rewards.sum(dtype=np.float64)
        assert (entry["truncated"], entry["terminated"]) == (final is not None, final is None)
        if final is not None and row % 20 == 0:
            np.testing.assert_array_equal(run.episode(row, ["reward"])["final/obs"], final)
    run.close()
    return len(table)


def cut_copy(killed, tmp_path, size):
    (tmp_path / NAME).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / NAME).write_bytes((killed / NAME).read_bytes()[:size])
    return tmp_path


def test_what_a_killed_recorder_flushed_is_read(killed):
    with pytest.raises(OSError, match="already open for write"):
        h5py.File(killed / NAME, "r", locking=False)
    before = (killed / NAME).read_bytes()
    assert check_episodes(killed) >= FLUSHED
    assert (killed / NAME).read_bytes() == before


def test_of_an_open_segment_that_was_cut_nothing_is_invented_and_no_reader_waits(killed, tmp_path):
    whole = (killed / NAME).stat().st_size
    sizes = {*np.linspace(0, whole, 80).astype(int).tolist(), *range(0, 64, 7), whole - 1}
    found = {}
    for size in sorted(sizes):
        run = cut_copy(killed, tmp_path, size)
        found[size] = check_episodes(run) if is_readable(run) else 0
    assert found[0] == 0
    assert found[whole] >= FLUSHED
    assert any(0 < count < FLUSHED for count in found.values())  # some are read as far as they go


def is_readable(path):
    """Whether any episode can be had; else the error names the segment."""
    try:
        return len(Run(path, partial=True).episodes()) > 0
    except DataError as error:
        if NAME not in str(error):
            raise
        return False


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_every_script_answers_or_refuses_a_cut_segment(killed, tmp_path, capsys, share):
    run = write_run(tmp_path, env=IMAGES, segments=1)
    (run / NAME).parent.mkdir()
    data = (killed / NAME).read_bytes()
    (run / NAME).write_bytes(data[: int(share * len(data))])
    for partial in ([], ["--partial"]):
        words = [str(run), *partial]
        csv, png, *others = (["-o", str(tmp_path / f"out.{kind}")] for kind in KINDS)
        options = episodes.add_options
        codes = {
            "episodes": command("x", None, episodes.analyse, options, [*words, *csv]),
            "actions": command("x", None, actions.analyse, arguments=[*words, *png]),
            "report": report.main([*words, *others[0]]),
            "video": video.main([*words, *others[1]]),
            "export": export.main([*words, *others[2], "--format", "d4rl"]),
            "index": index.main(words),
        }
        assert set(codes.values()) == {0 if partial else 2}, codes
        assert NAME in capsys.readouterr().err


def test_a_segment_is_read_while_it_is_written(tmp_path):
    recorder = start_recorder(tmp_path, 4000)
    counts = []
    while recorder.poll() is None:
        if (tmp_path / NAME).exists():
            segment = load_segment(tmp_path / NAME)
            counts.append(len(segment.index["start"]))
            last = segment.num_steps
            assert len(segment.read("observation/obs", max(0, last - 50), last)) == min(50, last)
            segment.close()
    assert recorder.returncode == -signal.SIGKILL
    assert len(counts) > 3
    assert counts == sorted(counts)
    assert check_episodes(tmp_path) >= 4000


def test_the_view_shows_the_file_as_it_was_but_for_its_flags(killed, tmp_path):
    path = cut_copy(killed, tmp_path, None) / NAME
    before = path.read_bytes()
    view = ClosedView(path)
    path.write_bytes(before + b"more")
    shown = bytearray(len(before))
    assert view.seek(0, 2) == len(before)
    assert (view.seek(0), view.readinto(memoryview(shown))) == (0, len(before))
    changed = np.flatnonzero(np.frombuffer(shown, np.uint8) != np.frombuffer(before, np.uint8))
    assert set(changed.tolist()) <= {11, *range(28, 36), *range(44, 48)}  # flags, end, checksum
    assert shown[11] == 0
    path.write_bytes(before[:1000])
    view.seek(900)
    with pytest.raises(OSError, match="has become shorter"):
        view.readinto(memoryview(shown))
    view.close()


def test_the_checksum_is_that_of_closed_files(tmp_path):
    """HDF5's own superblocks, of files with other ends, as the oracle."""
    for rows in (1, 1000):
        path = tmp_path / f"{rows}.h5"
        with h5py.File(path, "w", libver=("v110", "v110")) as file:
            file["x"] = np.zeros(rows)
        head = path.read_bytes()[:48]
        assert head[44:] == checksum(head[:44]).to_bytes(4, "little")
        assert closed_superblock(head, path.stat().st_size) == head
