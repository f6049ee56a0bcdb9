"""What is not in a recording, as far as what is there tells."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.segments import Segment, segment_number, writer_parts

RECORDING_ROLES = ("inference", "worker", "evaluator")


def is_selected(env_id: int, episode: int, fraction: float) -> bool:
    """Whether an episode belongs to the recorded `fraction`, by the writer's own rule."""
    digest = hashlib.blake2b(f"{env_id}/{episode}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def missing_numbers(paths: Sequence[Path]) -> list[str]:
    """Return names of segments whose successors are there while they are not."""
    by_writer: dict[Path, set[int]] = {}
    for path in paths:
        by_writer.setdefault(path.parent, set()).add(segment_number(path))
    return [
        str(folder / f"seg-{number:05d}.h5")
        for folder, numbers in sorted(by_writer.items())
        for number in range(max(numbers))
        if number not in numbers
    ]


def missing_ends(segments: Sequence[Segment]) -> list[str]:
    """Return what the last segments of writers say of segments after them that are not there."""
    last = {segment.writer: segment for segment in segments}
    return [
        f"{segment.path} is followed by another segment, which is missing, or its writer was "
        "killed before it began that one"
        for segment in last.values()
        if segment.finished and segment.end == "followed"
    ]


def missing_writers(paths: Sequence[Path], segments: Sequence[Segment]) -> list[str]:
    """Return the starts and the ranks that left no segment here, in words.

    Whether they had something to record isn't known: a rank in which no episode has ended, or a
    start with `recording.enabled` false, leaves nothing. So these are no errors.

    Args:
      paths: of all segments, readable or not.
      segments: the readable ones, which know the ranks of their job.
    """
    present = {writer_parts(path.parent.name) for path in paths}
    starts = {restart for _, _, restart in present}
    topologies = {segment.role_restart[2]: segment.topology for segment in segments}
    absent = [f"start {number}" for number in range(max(starts, default=0)) if number not in starts]
    for restart, topology in sorted(topologies.items()):
        expected = {(rank["role"], rank["index"], restart) for rank in topology.get("ranks", [])}
        absent += [
            f"{role} {index} of start {restart}"
            for role, index, _ in sorted(expected - present)
            if role in RECORDING_ROLES
        ]
    why = "it recorded no whole episode, or what it recorded was not copied or was removed"
    return [f"{which} has no segment here: {why}" for which in absent]


def missing_episodes(segments: Iterable[Segment]) -> int:
    """Return how many selected episodes are absent though a later one of their environment is.

    Beside the index, memory is that of two of its columns of one writer.
    """
    absent = 0
    for _, group in groupby(segments, key=lambda segment: segment.writer):
        written = list(group)
        fraction = float(written[0].attributes["fraction"])
        env_ids, episodes = (
            np.concatenate([segment.index[name] for segment in written])
            for name in ("env_id", "episode")
        )
        for env_id, first, last in _gaps(env_ids, episodes):
            if fraction >= 1:
                absent += last - first
            else:
                absent += sum(is_selected(env_id, n, fraction) for n in range(first, last))
    return absent


def _gaps(
    env_ids: NDArray[np.int64], episodes: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """Yield environment, first and one past the last number of each run of absent episodes."""
    order = np.lexsort((episodes, env_ids))
    env_ids, episodes = env_ids[order], episodes[order]
    same = env_ids[1:] == env_ids[:-1]
    before = np.full(len(episodes), -1)
    before[1:][same] = episodes[:-1][same]
    for place in np.flatnonzero(episodes > before + 1):
        yield int(env_ids[place]), int(before[place]) + 1, int(episodes[place])
