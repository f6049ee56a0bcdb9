"""What `hpcrl eval` leaves behind: its episodes, a table of them, and videos."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrl.code_version import code_version
from hpcrl.config.root import Config
from hpcrl.durable import atomic_write, json_text, reason
from hpcrl.evaluation.result import Evaluation
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
    """Return a recorder of all episodes of the environments with these `seeds`, which waits.

    Raises:
      OSError: its folder can't be created.
    """
    described = describe(config, "evaluation", 0, 0, code_version())
    attributes = {**described, "fraction": 1.0, "topology": "{}"}
    section = type(config.recording)(
        enabled=True,
        fields=config.recording.fields,
        compression=config.recording.compression,
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
        waits=True,
    )


def write_results(folder: Path, config_yaml: str, result: Evaluation, videos: int) -> Evaluation:
    """Write the table, the summary, the configuration and `videos` of the best episodes.

    Returns:
      The result, with what could not be written among its losses.
    """
    from analysis.errors import DataError

    messages, losses = list(result.messages), list(result.losses)
    try:
        _write_tables(folder, config_yaml, result)
    except OSError as error:
        losses.append(f"the table can't be written in {folder}: {reason(error)}")
    if videos and result.losses:
        losses.append("no video is made: the best episode may be one that is not recorded")
    elif videos:
        try:
            messages += _write_videos(folder, videos)
        except (OSError, DataError) as error:
            losses.append(f"the videos can't be written in {folder}: {reason(error)}")
    return replace(result, messages=tuple(messages), losses=tuple(losses))


def _write_tables(folder: Path, config_yaml: str, result: Evaluation) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(Episode._fields)
    writer.writerows(result.episodes)
    atomic_write(folder / "episodes.csv", text.getvalue())
    atomic_write(folder / "config.yaml", config_yaml)
    atomic_write(folder / "summary.json", json_text(result.summary(), indent=2) + "\n")


def _write_videos(folder: Path, count: int) -> list[str]:
    """Write videos of the best `count` recorded episodes; return what the reader should know."""
    from analysis.reader import Run
    from analysis.video import MOST_FRAMES, cut_note, encode, find_ffmpeg

    run = Run(folder)
    if run.image_leaf() is None:
        seen = any(name.startswith("observation/") for name in run.columns)
        why = "no observation is an image" if seen else "recording.fields has no observation"
        return [f"no video of {run.env_name} is made: {why}"]
    kind = "mp4" if find_ffmpeg() else "gif"
    best = run.episodes().sort_values("return", ascending=False).index[:count]
    notes = []
    for row in best.tolist():
        video = encode(run, row, kind, scale=3, fps=0.0, most=MOST_FRAMES)
        atomic_write(folder / f"episode-{row}.{kind}", video)
        if note := cut_note(run, row, MOST_FRAMES):
            whole = f"python -m analysis.video {folder} --episode {row} --max-frames 0"
            notes.append(f"{note}; all of them: {whole}")
    run.close()
    return notes
