"""What does an episode look like? An mp4 where ffmpeg is installed, else a GIF."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray
from PIL import GifImagePlugin, Image

from analysis._common import add_run_arguments, guarded, write_new
from analysis.episodes import best_episode
from analysis.errors import DataError
from analysis.reader import Run

MOST_FRAMES = 5000
"""Of a video for which nobody asked for another length: five and a half minutes of Atari."""

Frame = NDArray[np.uint8]

_READ_FRAMES = 256


def find_ffmpeg() -> str | None:
    """Return an ffmpeg: of the package imageio-ffmpeg, or of the system."""
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):  # the package has no program for every platform
        return shutil.which("ffmpeg")


def enlarge(frame: Frame, scale: int) -> Frame:
    """Return a colour frame `[H', W', 3]` with even sides, `scale` times as large."""
    colour = frame if frame.ndim == 3 else np.repeat(frame[..., None], 3, axis=-1)
    large = colour.repeat(scale, axis=0).repeat(scale, axis=1)
    height, width = (side // 2 * 2 for side in large.shape[:2])
    return np.ascontiguousarray(large[:height, :width])


def encode_mp4(frames: Iterable[Frame], fps: float, ffmpeg: str) -> bytes:
    """Return H.264 video of colour frames `[H, W, 3]`, of which one is held at a time.

    Raises:
      DataError: ffmpeg failed.
    """
    frames = iter(frames)
    first = next(frames)
    height, width = first.shape[:2]
    command = [ffmpeg, "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-", "-an"]
    command += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1"]
    command += ["-movflags", "frag_keyframe+empty_moov", "-f", "mp4", "-"]
    # Files, as a program whose pipe is full would wait for us while we wait for it.
    with TemporaryFile() as made, TemporaryFile() as said:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=made, stderr=said) as program:
            _feed(program, itertools.chain([first], frames))
        made.seek(0)
        said.seek(0)
        if program.returncode:
            why = said.read().decode(errors="replace").strip()[:300]
            raise DataError(f"ffmpeg failed: {why}")
        return made.read()


def _feed(program: subprocess.Popen[bytes], frames: Iterable[Frame]) -> None:
    if program.stdin is None:
        raise RuntimeError("the program was started without a pipe")
    # A program that ends early says why.
    with contextlib.suppress(BrokenPipeError), program.stdin as pipe:
        for frame in frames:
            pipe.write(frame.data)


def encode_gif(frames: Iterable[Frame], fps: float) -> bytes:
    """Return an animated GIF of colour frames `[H, W, 3]`, of which two are held at a time.

    Its rate is a whole number of 10 ms per frame. After the first one only what changes is stored.
    """
    duration_ms = max(20, round(100 / fps) * 10)
    buffer, before = io.BytesIO(), None
    for frame in frames:
        top, bottom, left, right = _changed_box(before, frame)
        picture = Image.fromarray(frame[top:bottom, left:right]).quantize(64)
        if before is None:
            buffer.writelines(GifImagePlugin.getheader(picture, info={"loop": 0})[0])
        buffer.writelines(
            GifImagePlugin.getdata(
                picture, (left, top), duration=duration_ms, include_color_table=True
            )
        )
        before = frame
    buffer.write(b";")
    return buffer.getvalue()


def _changed_box(before: Frame | None, frame: Frame) -> tuple[int, int, int, int]:
    """First and last row and column of what changed, the last ones excluded; never empty."""
    if before is None:
        return 0, frame.shape[0], 0, frame.shape[1]
    changed = (frame != before).any(axis=-1)
    if not changed.any():
        return 0, 1, 0, 1
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def episode_frames(run: Run, number: int) -> Iterator[Frame]:
    """Yield the frames `[H, W]` or `[H, W, 3]` of an episode, its final observation included.

    Raises:
      DataError: no image was recorded, or there is no such episode.
    """
    leaf = run.image_leaf()
    if leaf is None:
        raise DataError(f"{run.path}: no observation of {run.env_name} was recorded as an image")
    final = run.episode(number, ["reward"]).get(leaf.replace("observation/", "final/", 1))
    first, length = run.episodes()[["start", "length"]].loc[number]
    column = run.steps(leaf)
    for start in range(first, first + length, _READ_FRAMES):
        yield from column[start : min(start + _READ_FRAMES, first + length)]
    if final is not None:
        yield final


def cut_note(run: Run, number: int, most: int) -> str:
    """Return what to say of a video of the first `most` frames, "" where those are all; 0: all."""
    entry = run.episodes().loc[number]
    count = int(entry["length"]) + (int(entry["final"]) >= 0)
    if not most or count <= most:
        return ""
    return f"the video of episode {number} shows the first {most:,} of {count:,} frames"


def encode(
    run: Run, number: int, kind: str, scale: int, fps: float, most: int | None = None
) -> bytes:
    """Return an episode as the bytes of an mp4 or GIF file.

    Beside them, a few hundred frames as they were recorded are held, whatever its length.

    Args:
      run: where it was recorded.
      number: its row in `run.episodes()`.
      kind: "mp4" or "gif".
      scale: times as large.
      fps: frames per second; 0: as the emulator ran.
      most: frames to show, the first ones; None or 0: all.

    Raises:
      DataError: no frames, or no ffmpeg for an mp4.
    """
    shown = itertools.islice(episode_frames(run, number), most or None)
    frames = (enlarge(frame, scale) for frame in shown)
    fps = fps or 60.0 / run.segments[0].env["frame_skip"]
    if kind == "gif":
        return encode_gif(frames, fps)
    ffmpeg = find_ffmpeg()
    if ffmpeg is None:
        raise DataError("an mp4 needs ffmpeg: pip install imageio-ffmpeg, or choose --format gif")
    return encode_mp4(frames, fps, ffmpeg)


def main(arguments: list[str] | None = None) -> int:
    """Write the video of one episode."""
    parser = argparse.ArgumentParser("python -m analysis.video", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, help="file to write; it must not exist")
    parser.add_argument("--format", choices=("mp4", "gif"))
    parser.add_argument("--episode", type=int, help="row of the episodes; the best if absent")
    parser.add_argument("--scale", type=int, default=3, help="times as large")
    parser.add_argument("--fps", type=float, default=0.0, help="0: as the emulator ran")
    parser.add_argument(
        "--max-frames", type=int, default=MOST_FRAMES, help="to show, the first ones; 0: all"
    )
    options = parser.parse_args(arguments)

    def act() -> None:
        if options.output and len(options.runs) > 1:
            raise DataError(f"{options.output} is one file for {len(options.runs)} runs; omit -o")
        for path in options.runs:
            run = Run(path, options.partial)
            suffix = options.output.suffix.lstrip(".") if options.output else ""
            kind = options.format or suffix or ("mp4" if find_ffmpeg() else "gif")
            if kind not in ("mp4", "gif"):
                raise DataError(f"{options.output}: end its name in .mp4 or .gif")
            row = options.episode
            row = best_episode(run.episodes()) if row is None else row
            output = options.output or Path(f"{run.name}-episode-{row}.{kind}")
            if output.exists():
                raise DataError(f"{output} exists; nothing is written over")
            most = max(0, options.max_frames)
            write_new(output, encode(run, row, kind, options.scale, options.fps, most))
            if note := cut_note(run, row, most):
                print(f"note: {note}; all of them: --max-frames 0", file=sys.stderr)

    return guarded("video", act)


if __name__ == "__main__":
    sys.exit(main())
