"""Videos of episodes, with ffmpeg and without."""

import io
import sys

import pytest
from PIL import Image, ImageSequence

from analysis import video
from analysis.errors import DataError
from analysis.reader import Run
from tests.recording_tools import IMAGES, write_run


def test_videos_hold_every_frame(tmp_path):
    run = Run(write_run(tmp_path, env=IMAGES))
    shown = video.episode_frames(run, 9)
    assert shown.shape == (7 + 1, 20, 24)  # its final observation included
    assert (shown[-1] == 200).all()
    gif = Image.open(io.BytesIO(video.encode(run, 9, "gif", 2, 10.0)))
    frames = sum(1 for _ in ImageSequence.Iterator(gif))
    assert (frames, gif.size, gif.info["duration"]) == (8, (48, 40), 100)


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
    frames = video.enlarge(video.episode_frames(Run(write_run(tmp_path, env=IMAGES)), 9), 2)
    echo, fails = tmp_path / "echo", tmp_path / "fails"
    echo.write_text("#!/bin/sh\ncat\n")
    fails.write_text("#!/bin/sh\necho no such codec >&2\nexit 1\n")
    for program in (echo, fails):
        program.chmod(0o755)
    assert video.encode_mp4(frames, 15.0, str(echo)) == frames.tobytes()
    with pytest.raises(DataError, match="ffmpeg failed: no such codec"):
        video.encode_mp4(frames, 15.0, str(fails))
