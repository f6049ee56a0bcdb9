"""What does an episode look like? An mp4 where ffmpeg is installed, else a GIF."""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from analysis._common import add_run_arguments, guarded, write_new
from analysis.episodes import best_episode
from analysis.errors import DataError
from analysis.reader import Run

Frames = NDArray[np.uint8]


def find_ffmpeg() -> str | None:
    """Return an ffmpeg: of the package imageio-ffmpeg, or of the system."""
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):  # the package has no program for every platform
        return shutil.which("ffmpeg")


def enlarge(frames: Frames, scale: int) -> Frames:
    """Return colour frames `[T, H', W', 3]` with even sides, `scale` times as large."""
    colour = frames if frames.ndim == 4 else np.repeat(frames[..., None], 3, axis=-1)
    large = colour.repeat(scale, axis=1).repeat(scale, axis=2)
    height, width = (side // 2 * 2 for side in large.shape[1:3])
    return np.ascontiguousarray(large[:, :height, :width])


def encode_mp4(frames: Frames, fps: float, ffmpeg: str) -> bytes:
    """Return H.264 video of colour frames.

    Raises:
      DataError: ffmpeg failed.
    """
    height, width = frames.shape[1:3]
    command = [ffmpeg, "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-", "-an"]
    command += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1"]
    command += ["-movflags", "frag_keyframe+empty_moov", "-f", "mp4", "-"]
    done = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=False)
    if done.returncode:
        raise DataError(f"ffmpeg failed: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def encode_gif(frames: Frames, fps: float) -> bytes:
    """Return an animated GIF of colour frames; its rate is a whole number of 10 ms per frame."""
    pictures = [Image.fromarray(frame).quantize(64) for frame in frames]
    buffer = io.BytesIO()
    duration_ms = max(20, round(100 / fps) * 10)
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=duration_ms, loop=0
    )
    return buffer.getvalue()


def episode_frames(run: Run, number: int) -> Frames:
    """Return the frames of an episode, its final observation included, `[T, H, W(, 3)]`.

    Raises:
      DataError: no image was recorded.
    """
    leaf = run.image_leaf()
    if leaf is None:
        raise DataError(f"{run.path}: no observation of {run.env_name} was recorded as an image")
    episode = run.episode(number, [leaf])
    final = episode.get(leaf.replace("observation/", "final/", 1))
    frames: Frames = episode[leaf]
    return frames if final is None else np.concatenate([frames, final[None]])


def encode(
    run: Run, number: int, kind: str, scale: int, fps: float, most: int | None = None
) -> bytes:
    """Return an episode, its first `most` frames at most, as the bytes of an mp4 or GIF file.

    Raises:
      DataError: no frames, or no ffmpeg for an mp4.
    """
    frames = enlarge(episode_frames(run, number)[:most], scale)
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
            write_new(output, encode(run, row, kind, options.scale, options.fps))

    return guarded("video", act)


if __name__ == "__main__":
    sys.exit(main())
