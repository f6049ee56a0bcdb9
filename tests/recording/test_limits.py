"""What recording does where memory or disk end: whole episodes are dropped, acting goes on."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from analysis import segments as reading
from analysis.reader import Run
from hpcrl.comm.wire import row_fields
from hpcrl.config.sections import RecordingConfig
from hpcrl.recording import SegmentWriter, open_recorder, segment
from hpcrl.recording.episodes import column_specs
from hpcrl.recording.segment import reserve_bytes
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from tests.acting_tools import Stage
from tests.recording.recorded import by_identity, played_episodes, recorded_stage
from tests.recording_tools import assert_same_episode, naive_episodes, recorder_for
from tests.small import config_of


def notes_of(path):
    run = Run(path)
    assert run.segments
    return run.notes


def test_recording_ends_before_max_bytes_and_training_is_not_told(tmp_path):
    folder = tmp_path / "trajectories" / "inference-0-0"
    stage, recorder = recorded_stage(
        folder, "terminating", steps=2000, max_bytes=900_000, segment_bytes=200_000
    )
    files = list(folder.iterdir())
    assert sum(path.stat().st_size for path in files) <= 900_000
    assert all(path.suffix == ".h5" for path in files)
    assert any("had reached recording.max_bytes" in note for note in notes_of(tmp_path))
    episodes = len(played_episodes(stage))
    assert recorder.recorded + recorder.dropped == episodes
    assert recorder.dropped > 0
    assert len(Run(tmp_path).episodes()) == recorder.recorded


def failing_from(call, function):
    """`function`, but from its call number `call` on the disk is full."""
    calls = itertools.count()

    def fails(*arguments, **options):
        if next(calls) >= call:
            raise OSError(28, "No space left on device")
        return function(*arguments, **options)

    return fails


DISK_ERRORS = {
    "in the first write": (0.0, "_extend", 0),
    "in a later write": (0.0, "_extend", 300),
    "in the only write, at the end": (1e9, "_extend_by_chunks", 0),
    "while a segment is made durable": (0.0, "sync_file", 0),
    "while the third segment is closed": (0.0, "sync_directory", 2),
}


@pytest.mark.parametrize("when", DISK_ERRORS)
def test_after_a_disk_error_what_counts_as_recorded_is_on_disk(tmp_path, monkeypatch, when):
    flush_s, name, call = DISK_ERRORS[when]
    monkeypatch.setattr(segment, "FLUSH_S", flush_s)
    monkeypatch.setattr(segment, "_MAX_QUANTUM_ROWS", 16)
    monkeypatch.setattr(segment, "_WIDE_BYTES", 8)  # the observations are compressed in chunks
    monkeypatch.setattr(segment, name, failing_from(call, getattr(segment, name)))
    folder = tmp_path / "trajectories" / "inference-0-0"
    rotate = {"segment_bytes": 1} if "third" in when else {}
    stage, recorder = recorded_stage(folder, "terminating", steps=200, **rotate)
    assert stage.unrolls
    segments = [reading.load_segment(path) for path in sorted(folder.glob("seg-*"))]
    on_disk = sum(len(found.index["start"]) for found in segments)
    assert recorder.recorded == on_disk
    assert recorder.dropped == len(played_episodes(stage)) - on_disk
    assert (on_disk > 0) == ("first" not in when and "only" not in when)


def test_a_slow_disk_drops_whole_episodes_and_never_holds_acting_up(tmp_path, monkeypatch):
    """The disk answers nothing until all is played."""
    answers = threading.Event()
    append = SegmentWriter.append

    def slow(self, *arguments):
        assert answers.wait(60)
        append(self, *arguments)

    monkeypatch.setattr(SegmentWriter, "append", slow)
    stage = Stage("scripted")
    folder = tmp_path / "trajectories" / "inference-0-0"
    spec, behaviour = stage.spec, stage.brain.behaviour
    recorder = recorder_for(folder, spec, behaviour, len(stage.envs), buffer_bytes=6000)
    stage.policy.sink = recorder
    for _ in range(100):
        stage.step()
    assert recorder.recorded == 0
    dropped = recorder.dropped
    assert dropped > 5
    answers.set()
    recorder.close()
    expected = played_episodes(stage)
    run = Run(tmp_path)
    recorded = by_identity(run)
    assert 0 < len(recorded) == len(expected) - recorder.dropped
    for identity, (steps, entry) in recorded.items():
        assert_same_episode(steps, entry, expected[identity])
    last = {env_id: max(n for e, n in recorded if e == env_id) for env_id, _ in recorded}
    missing = expected.keys() - recorded.keys()
    absent = sum(number < last.get(env_id, 0) for env_id, number in missing)
    if absent:
        assert f"{absent} episodes are not in the recording" in run.notes[0]
        assert f"{recorder.dropped} were dropped while recording" in run.notes[0]
    assert run.segments[-1].attributes["dropped_episodes"] == recorder.dropped
    assert recorder._budget.take(6000)  # all memory is free again


def test_who_may_wait_runs_at_most_an_episode_of_each_environment_ahead(tmp_path, monkeypatch):
    """Of a slow disk; else all would be played before it has taken the third."""
    append = SegmentWriter.append
    ahead: list[int] = []

    def slow(self, *arguments):
        time.sleep(0.01)
        ahead.append(played() - len(ahead))
        append(self, *arguments)

    monkeypatch.setattr(SegmentWriter, "append", slow)
    stage = Stage("scripted")
    folder = tmp_path / "trajectories" / "inference-0-0"
    spec, behaviour, envs = stage.spec, stage.brain.behaviour, len(stage.envs)
    recorder = recorder_for(folder, spec, behaviour, envs, waits=True, buffer_bytes=1)

    def played():
        return sum(len(naive_episodes(history.rows)) for history in stage.expected)

    stage.policy.sink = recorder
    for _ in range(60):
        stage.step()
    recorder.close()
    assert recorder.recorded == played() > 30
    assert recorder.dropped == 0
    assert max(ahead) <= 2 * envs + 2


FRAMES = EnvSpec(
    "x:y",
    {"obs": ObservationLeaf(ArraySpec((84, 84), "uint8"), "image")},
    ActionSpec((ActionPart("discrete", nvec=(2,)),)),
)


def test_what_waits_for_its_chunk_or_to_be_written_counts_as_bytes_on_disk(tmp_path, monkeypatch):
    """Frames that no filter makes smaller, none of which is flushed before the end."""
    monkeypatch.setattr("hpcrl.recording.segment.FLUSH_S", 1e9)
    columns = column_specs(FRAMES, {}, RecordingConfig().fields)
    limit = reserve_bytes(columns) + 1_000_000
    folder = tmp_path / "trajectories" / "inference-0-0"
    recorder = recorder_for(folder, FRAMES, {}, 1, max_bytes=limit)
    rng = np.random.default_rng(0)
    fields = row_fields(FRAMES, {})
    for step in range(400):  # 2.8 MB in episodes of 10 steps
        rows = {name: np.zeros((1, *array.shape), array.dtype) for name, array in fields.items()}
        rows["obs:obs"][:] = rng.integers(0, 256, (84, 84))
        rows["start"][:] = step % 10 == 0
        rows["terminated"][:] = step > 0 and step % 10 == 0
        recorder.add(np.array([0]), rows)
    recorder.close()
    (path,) = folder.iterdir()
    assert 500_000 < path.stat().st_size <= limit
    assert recorder.recorded + recorder.dropped == 40
    assert recorder.dropped > 20


@pytest.mark.parametrize(
    ("before", "room"), [(0, 1_000_000), (110_000, 963_333), (2_999_998, 1), (4_000_000, 1)]
)
def test_ranks_share_what_earlier_starts_have_left_of_max_bytes(
    tmp_path, monkeypatch, before, room
):
    """Two inference ranks and an evaluator: a third each; a room of 0 would mean no bound."""
    config = config_of(recording={"enabled": True, "max_bytes": 3_000_000})
    roles = ["learner", "inference", "inference", "evaluator", "actor"]
    topology = SimpleNamespace(
        role_of=roles,
        ranks_of=lambda role: [rank for rank, name in enumerate(roles) if name == role],
        to_json=dict,
    )
    job = SimpleNamespace(
        config=config, run_dir=tmp_path, topology=topology, rank=2, role_index=1, restart=1,
        env=FRAMES, behaviour={}, seed=lambda *of: 7, recorded_bytes=before, code_version="1+g0",
    )  # fmt: skip
    monkeypatch.setattr("hpcrl.recording.recorder.Recorder", lambda *given: given)
    ids, evaluates = np.array([4, 5]), np.array([False, True])
    folder, *_, attributes, given, evaluation = open_recorder(job, ids, evaluates)
    assert folder == tmp_path / "trajectories" / "inference-1-1"
    assert given == room
    assert evaluation == [5]
    assert attributes["code_version"] == "1+g0"
    assert (attributes["rank"], attributes["role_index"], attributes["restart"]) == (2, 1, 1)
