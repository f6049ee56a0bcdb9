"""What a recording holds: the chosen fraction and fields, segments, what describes it."""

import h5py
import pytest

from analysis import segments as reading
from analysis.reader import Run
from hpcrl.recording import SCHEMA_VERSION, is_selected
from hpcrl.recording.segment import FORMAT
from tests.recording.recorded import by_identity, played_episodes, recorded_stage


def test_a_fraction_is_recorded_whole_and_leaves_no_gap(tmp_path):
    stage, _ = recorded_stage(tmp_path / "trajectories" / "inference-0-0", "scripted", fraction=0.4)
    run = Run(tmp_path)
    recorded = by_identity(run)
    every = played_episodes(stage).keys()
    assert recorded.keys() == {identity for identity in every if is_selected(*identity, 0.4)}
    assert 0 < len(recorded) < len(every)
    assert run.notes == []


def test_segments_rotate_and_a_restart_appends_new_ones(tmp_path):
    root = tmp_path / "trajectories"
    recorded_stage(root / "inference-0-0", "scripted", steps=60, segment_bytes=1)
    first = sorted((root / "inference-0-0").iterdir())
    bytes_before = [path.read_bytes() for path in first]
    assert len(first) > 3
    recorded_stage(root / "inference-0-0", "scripted", steps=20)
    recorded_stage(root / "inference-0-1", "scripted", steps=20)
    assert [path.read_bytes() for path in first] == bytes_before
    assert len(list((root / "inference-0-0").iterdir())) == len(first) + 1
    assert set(Run(tmp_path).episodes()["restart"]) == {0, 1}


def test_an_episode_that_ends_late_begins_a_segment(tmp_path):
    folder = tmp_path / "trajectories" / "inference-0-0"
    _, recorder = recorded_stage(folder, "scripted", steps=30, segment_s=1e-9)
    assert len(list(folder.iterdir())) == recorder.recorded > 3
    assert len(Run(tmp_path).episodes()) == recorder.recorded


ALWAYS = {"action", "reward", "terminated", "truncated"}
FIELDS = {
    "observation": {"observation/obs"},
    "policy_version": {"policy_version"},
    "behaviour": {"behaviour/log_prob", "behaviour/value"},
}


@pytest.mark.parametrize("fields", [(), *[(name,) for name in FIELDS], tuple(FIELDS)], ids=str)
def test_fields_choose_what_is_kept(tmp_path, fields):
    recorded_stage(tmp_path / "trajectories" / "inference-0-0", "scripted", 30, fields=fields)
    run = Run(tmp_path)
    chosen = set().union(*(FIELDS[name] for name in fields))
    assert {c for c in run.columns if c in ALWAYS | set().union(*FIELDS.values())} == (
        ALWAYS | chosen
    )
    assert {c.split("/")[0] for c in run.columns} == ALWAYS | set(fields)
    table = run.episodes()
    assert (table["final"] >= 0).any() == ("observation" in fields)
    assert (table["first_policy_version"] >= 0).all() == ("policy_version" in fields)


def test_attributes_describe_the_recording_and_its_format_is_that_of_hdf5_1_10(tmp_path):
    folder = tmp_path / "trajectories" / "inference-0-0"
    recorded_stage(folder, "stacked")
    path = folder / "seg-00000.h5"
    with h5py.File(path) as file:
        assert file.attrs["format"] == FORMAT == reading.FORMAT
        assert file.attrs["schema_version"] == SCHEMA_VERSION == reading.SCHEMA_VERSION
        assert file.attrs["closed"]
        assert file.attrs["end"] == b"finished"
        assert file.attrs["dropped_episodes"] == 0
        versions = file["steps/policy_version"][:]
        assert file.attrs["first_policy_version"] == versions.min()
        assert file.attrs["last_policy_version"] == versions.max()
        # Frames once: the leaf is stacked 4 times for the network only.
        assert file["steps/observation/obs"].shape[1:] == (2,)
    assert path.read_bytes()[8] == 3  # superblock version, the newest of HDF5 1.10
