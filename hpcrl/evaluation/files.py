"""What `hpcrl eval` leaves behind: its episodes, a table of them, and videos."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.root import Config
from hpcrl.durable import atomic_write, json_text
from hpcrl.evaluation.whole_episodes import Episode
from hpcrl.recording import Recorder
from hpcrl.recording.recorder import describe
from hpcrl.specs import ArraySpec, EnvSpec


def new_folder(run: Path, learner_steps: int) -> Path:
    """Create and return RUN/evaluations/step-N-K for the lowest free K.

    Raises:
      OSError: it can't be created.
    """
    number = 0
    while True:
        folder = run / "evaluations" / f"step-{learner_steps}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


def open_eval_recorder(
    folder: Path,
    config: Config,
    env: EnvSpec,
    behaviour: Mapping[str, ArraySpec],
    seeds: Sequence[int],
) -> Recorder:
    """Return a recorder of all episodes of the environments with these `seeds`.

    Raises:
      OSError: its folder can't be created.
    """
    attributes = {**describe(config, "evaluation", 0, 0), "fraction": 1.0, "topology": "{}"}
    section = type(config.recording)(
        enabled=True,
        fields=config.recording.fields,
        compression=config.recording.compression,
        buffer_bytes=config.recording.buffer_bytes,
    )
    return Recorder(
        folder / "trajectories" / "evaluation-0-0",
        section,
        env,
        behaviour,
        dict(enumerate(seeds)),
        attributes,
        0,
        range(len(seeds)),
    )


def write_tables(
    folder: Path,
    config_yaml: str,
    summary: Mapping[str, Any],
    episodes: Sequence[Episode],
) -> None:
    """Write summary.json, episodes.csv and the configuration.

    Raises:
      OSError: they can't be written.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(Episode._fields)
    writer.writerows(episodes)
    atomic_write(folder / "episodes.csv", text.getvalue())
    atomic_write(folder / "config.yaml", config_yaml)
    atomic_write(folder / "summary.json", json_text(dict(summary), indent=2) + "\n")


def write_videos(folder: Path, count: int) -> list[Path]:
    """Write videos of the best `count` recorded episodes; none where there are no images.

    Raises:
      analysis.errors.DataError: the recording can't be read or encoded.
    """
    from analysis.reader import Run
    from analysis.video import encode, find_ffmpeg

    run = Run(folder)
    if run.image_leaf() is None:
        return []
    kind = "mp4" if find_ffmpeg() else "gif"
    best = run.episodes().sort_values("return", ascending=False).index[:count]
    written = []
    for row in best.tolist():
        path = folder / f"episode-{row}.{kind}"
        path.write_bytes(encode(run, row, kind, scale=3, fps=0.0))
        written.append(path)
    run.close()
    return written
