"""Trajectories on disk: whole episodes, as they were played, in single-writer HDF5 segments."""

from hpcrl.recording.episodes import Budget, Episode, EpisodeBuilder, is_selected
from hpcrl.recording.recorder import Recorder, open_recorder
from hpcrl.recording.segment import SCHEMA_VERSION, SegmentWriter

__all__ = [
    "SCHEMA_VERSION",
    "Budget",
    "Episode",
    "EpisodeBuilder",
    "Recorder",
    "SegmentWriter",
    "is_selected",
    "open_recorder",
]
