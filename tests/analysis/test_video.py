"""Videos of episodes, with ffmpeg and without."""

import io
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageSequence

from analysis import video
from analysis.errors import DataError
from analysis.reader import Run
from tests.recording_tools import IMAGES, write_run


@pytest.mark.parametrize("read", [1, 3, 7, 256])
def test_videos_hold_every_frame(tmp_path, monkeypatch, read):
    monkeypatch.setattr(video, "_READ_FRAMES", read)
    run = Run(write_run(tmp_path, env=IMAGES))
    shown = list(video.episode_frames(run, 29))  # in the second segment
    # Step t of episode k shows k + t; 200 is the final observation.
    assert [frame.tolist() for frame in shown] == [
        [[value] * 24] * 20 for value in [*range(29, 29 + 7), 200]
    ]
    gif = Image.open(io.BytesIO(video.encode(run, 29, "gif", 2, 10.0)))
    pictures = [np.array(p.convert("L")) for p in ImageSequence.Iterator(gif)]
    assert (gif.size, gif.info["duration"]) == ((48, 40), 100)
    assert [(p.min(), p.max()) for p in pictures] == [(f.min(), f.max()) for f in shown]
    assert num_frames(io.BytesIO(video.encode(run, 29, "gif", 2, 10.0, 3))) == 3


def num_frames(gif):
    with Image.open(gif) as opened:
        return opened.n_frames


def test_a_gif_shows_each_frame_whatever_changed_in_it():
    """Nothing, a corner, everything; in four grey levels, which its palette keeps."""
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 4, (30, 40, 1), np.uint8).repeat(3, axis=2) * 60 for _ in range(3)]
    frames.insert(1, frames[0].copy())
    corner = frames[-1].copy()
    corner[25:, 38:] = 120
    frames += [corner, corner]
    gif = Image.open(io.BytesIO(video.encode_gif(iter(frames), 15.0)))
    for picture, frame in zip(ImageSequence.Iterator(gif), frames, strict=True):
        np.testing.assert_array_equal(np.array(picture.convert("RGB")), frame)


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_memory_does_not_grow_with_the_length_of_a_video(tmp_path, kind):
    """Frames of 120 kB, of which all together would be 36 MB."""
    reads = tmp_path / "reads"
    reads.write_text("#!/bin/sh\nwc -c\n")
    reads.chmod(0o755)
    shown = (np.full((200, 200, 3), value % 2 * 200, np.uint8) for value in range(300))
    tracemalloc.start()
    if kind == "gif":
        made = video.encode_gif(shown, 15.0)
    else:
        made = video.encode_mp4(shown, 15.0, str(reads))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e6
    assert kind == "gif" or int(made) == 300 * 120_000


def test_a_video_that_is_cut_says_so_and_one_of_all_frames_can_be_had(
    tmp_path, monkeypatch, capsys
):
    run = write_run(tmp_path, env=IMAGES)
    monkeypatch.chdir(tmp_path)
    assert video.MOST_FRAMES == 5000
    assert video.main([str(run), "--episode", "9", "-o", "a.gif", "--max-frames", "7"]) == 0
    note = "note: the video of episode 9 shows the first 7 of 8 frames; all of them: --max-frames 0"
    assert note in capsys.readouterr().err
    for most in ("0", "8", "5000"):
        arguments = ["--episode", "9", "-o", f"{most}.gif", "--max-frames", most]
        assert video.main([str(run), *arguments]) == 0
        assert "shows the first" not in capsys.readouterr().err
    lengths = [num_frames(f"{name}.gif") for name in ("a", "0", "8", "5000")]
    assert lengths == [7, 8, 8, 8]


def without_ffmpeg(monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_a_video_is_a_gif_where_there_is_no_ffmpeg_and_an_mp4_says_what_it_needs(
    tmp_path, monkeypatch, capsys
):
    run = write_run(tmp_path, env=IMAGES)
    without_ffmpeg(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert video.main([str(run), "--episode", "9"]) == 0
    with Image.open(tmp_path / "run-episode-9.gif") as gif:
        assert gif.n_frames == 8
    assert video.main([str(run), "-o", "episode.mp4"]) == 2
    assert "pip install imageio-ffmpeg, or choose --format gif" in capsys.readouterr().err
    assert video.main([str(run), str(run), "-o", "both.gif"]) == 2
    assert "both.gif is one file for 2 runs" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-episode-9.gif"]


def test_ffmpeg_gets_every_frame_and_an_error_of_its_is_told(tmp_path):
    """A program in place of ffmpeg that gives back what it was given, or fails."""
    shown = video.episode_frames(Run(write_run(tmp_path, env=IMAGES)), 9)
    frames = [video.enlarge(frame, 2) for frame in shown]
    echo, fails = tmp_path / "echo", tmp_path / "fails"
    echo.write_text("#!/bin/sh\ncat\n")
    fails.write_text("#!/bin/sh\necho no such codec >&2\nexit 1\n")
    for program in (echo, fails):
        program.chmod(0o755)
    assert frames[0].shape == (40, 48, 3)
    assert video.encode_mp4(frames, 15.0, str(echo)) == b"".join(f.tobytes() for f in frames)
    with pytest.raises(DataError, match="ffmpeg failed: no such codec"):
        video.encode_mp4(frames * 1000, 15.0, str(fails))


def test_an_mp4_is_one_that_ffmpeg_shows(tmp_path):
    ffmpeg = video.find_ffmpeg()
    if ffmpeg is None:
        pytest.skip("neither ffmpeg nor imageio-ffmpeg is here: no mp4 can be made")
    run = Run(write_run(tmp_path, env=IMAGES))
    path = tmp_path / "episode.mp4"
    path.write_bytes(video.encode(run, 9, "mp4", 3, 10.0))
    assert path.read_bytes()[4:8] == b"ftyp"
    command = [ffmpeg, "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, 60, 72)
    expected = [frame.mean() for frame in video.episode_frames(run, 9)]
    assert [frame.mean() for frame in frames] == pytest.approx(expected, abs=4)
