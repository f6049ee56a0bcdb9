"""What is recorded is what was played: whole episodes, or none of one."""

import threading

import h5py
import numpy as np
import pytest

from analysis import segments as reading
from analysis.reader import Run
from env_wrappers import make
from hpcrl.comm.wire import row_fields
from hpcrl.recording import SCHEMA_VERSION, Budget, EpisodeBuilder, SegmentWriter, is_selected
from hpcrl.recording.segment import FORMAT
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from tests.acting_tools import CPU, KINDS, Stage, weights
from tests.loopback_job import JobRun
from tests.recording_tools import assert_same_episode, naive_episodes, recorder_for
from tests.small import brain_of, config_of, rows_of


def recorded_stage(folder, kind, steps=120, **section):
    """A stage whose rows are recorded, after random steps; returns it and its recorder."""
    stage = Stage(kind)
    recorder = recorder_for(folder, stage.spec, stage.brain.behaviour, len(stage.envs), **section)
    stage.policy.sink = recorder
    for _ in range(steps):
        stage.step()
    recorder.close()
    return stage, recorder


def by_identity(run: Run) -> dict[tuple[int, int], tuple[dict, dict]]:
    """Recorded episodes: steps and line of the index by (environment, number)."""
    table = run.episodes()
    return {
        (entry["env_id"], entry["episode"]): (run.episode(row), entry)
        for row, entry in enumerate(table.to_dict("records"))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_on_disk_are_those_of_a_naive_recorder(tmp_path, kind):
    stage, recorder = recorded_stage(tmp_path / "trajectories" / "inference-0-0", kind)
    recorded = by_identity(Run(tmp_path))
    expected = {
        (env_id, number): episode
        for env_id, history in enumerate(stage.expected)
        for number, episode in enumerate(naive_episodes(history.rows))
    }
    assert len(expected) > 10
    assert recorded.keys() == expected.keys()
    for identity, (steps, entry) in recorded.items():
        assert_same_episode(steps, entry, expected[identity])
        assert entry["env_seed"] == 100 + identity[0]
        assert entry["return"] == steps["reward"].astype(np.float64).sum()
    assert recorder.recorded == len(expected)
    assert recorder.dropped == 0


def test_flags_that_travel_as_bits_are_recorded_one_byte_each(tmp_path):
    leaf = ObservationLeaf(ArraySpec((2,), "uint8"), "binary", bits=(3, 5))
    spec = EnvSpec("x:y", {"planes": leaf}, ActionSpec((ActionPart("discrete", nvec=(2,)),)))
    recorder = recorder_for(tmp_path / "trajectories" / "inference-0-0", spec, {}, 1)
    flags = np.random.default_rng(0).integers(0, 2, (4, 3, 5))
    for step, planes in enumerate(flags):
        rows = {
            name: np.zeros((1, *array.shape), array.dtype)
            for name, array in row_fields(spec, {}).items()
        }
        rows["obs:planes"] = np.packbits(planes.reshape(1, 15), axis=-1)
        rows["start"][:], rows["final"][:] = step == 0, step == 3
        recorder.add(np.array([0]), rows)
    recorder.close()
    run = Run(tmp_path)
    steps = run.episode(0)
    np.testing.assert_array_equal(steps["observation/planes"], flags[:3])
    np.testing.assert_array_equal(steps["final/planes"], flags[3])
    assert run.image_leaf() is None
    assert run.segments[0].env["observation"]["planes"]["array"]["shape"] == [3, 5]


def test_a_restarted_environment_leaves_an_interrupted_episode(tmp_path):
    stage = Stage("truncating")
    folder = tmp_path / "trajectories" / "inference-0-0"
    recorder = recorder_for(folder, stage.spec, stage.brain.behaviour, 3)
    stage.policy.sink = recorder
    for _ in range(2):
        stage.step([0, 1, 2])
    before = naive_episodes(stage.expected[1].rows)
    stage.restart(1)
    for _ in range(10):
        stage.step([0, 1, 2])
    recorder.close()
    recorded = by_identity(Run(tmp_path))
    assert [episode["ending"] for episode in before] == ["interrupted"]
    steps, entry = recorded[1, 0]
    assert_same_episode(steps, entry, before[0])
    for number, episode in enumerate(naive_episodes(stage.expected[1].rows)):
        steps, entry = recorded[1, number + 1]
        assert_same_episode(steps, entry, episode)


LAYOUTS = {
    "seed": ({}, {"inference": 2, "actors": 2}, 5),
    "impala": ({"layout": "impala"}, {"inference": "auto", "actors": 2}, 3),
    "sync": ({"layout": "sync", "agent": {"name": "ppo"}}, {"inference": 2, "actors": 2}, 5),
    "sync-local": (
        {"layout": "sync", "placement": "local", "agent": {"name": "ppo"}},
        {"inference": "auto", "actors": 2},
        3,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_job_records_every_episode_of_every_environment(tmp_path, monkeypatch, layout):
    sections, topology, size = LAYOUTS[layout]
    config = config_of(
        **sections,
        learner={"batch_unrolls": 8, "unroll_steps": 3, "backend": "mpi"},
        run={"dir": str(tmp_path)},
        env={
            "name": "synthetic:counting",
            "envs_per_actor": 4,
            "groups": 2,
            "options": {
                "episode_length": 3,
                "length_spread": 4,
                "truncate": True,
                "observation_shape": [2],  # small numbers, so that every action is taken
            },
        },
        topology=topology,
        recording={"enabled": True},
        stop={"agent_steps": 300},
    )
    job = JobRun(monkeypatch).start(config, size)
    assert job.codes == [0] * size
    run = Run(tmp_path)
    table = run.episodes()
    role = "inference" if size == 5 else "worker"
    assert set(table["writer"]) == {f"{role}-0-0", f"{role}-1-0"}
    assert table["env_id"].nunique() == 8
    histories = dict(zip(job.seeds, job.histories, strict=True))
    per_env_last = table.groupby("env_id")["episode"].max()
    for row, entry in enumerate(table.to_dict("records")):
        played = naive_episodes(histories[entry["env_seed"]].rows)
        if entry["episode"] == len(played):  # it had begun, and no answer came
            assert entry["length"] == 1
            continue
        expected = played[entry["episode"]]
        steps = run.episode(row)
        if entry["complete"] and expected["ending"] != "interrupted":
            assert_same_episode(steps, entry, expected)
            continue
        # The last rows of the environment may not have been answered, or not been recorded.
        common = min(entry["length"], len(expected["reward"]))
        assert entry["episode"] == per_env_last[entry["env_id"]]
        for name in ("reward", "action"):
            np.testing.assert_array_equal(steps[name][:common], expected[name][:common])
    per_env = table.groupby("env_id")["episode"]
    assert (per_env.max() + 1 == per_env.count()).all()
    last = run.metrics().iloc[-1]
    assert last["dropped_episodes"] == 0
    assert 0 < last["recorded_episodes"] <= len(table)
    assert run.config["recording"]["enabled"] is True
    assert set(run.steps("action")[:].ravel()) == {0, 1, 2, 3}


def test_the_hash_selects_the_fraction_and_nests():
    identities = [(env_id, episode) for env_id in range(40) for episode in range(100)]
    chosen = {f: {i for i in identities if is_selected(*i, f)} for f in (0.0, 0.1, 0.5, 1.0)}
    assert chosen[0.0] == set()
    assert chosen[1.0] == set(identities)
    assert chosen[0.1] < chosen[0.5]
    # 4000 draws: five standard deviations are 95 and 158.
    assert abs(len(chosen[0.1]) - 400) < 95
    assert abs(len(chosen[0.5]) - 2000) < 158
    assert all(reading.is_selected(*i, 0.3) == is_selected(*i, 0.3) for i in identities)


def test_a_fraction_is_recorded_whole_and_leaves_no_gap(tmp_path):
    stage, _ = recorded_stage(tmp_path / "trajectories" / "inference-0-0", "scripted", fraction=0.4)
    run = Run(tmp_path)
    recorded = by_identity(run)
    every = {
        (env_id, number)
        for env_id, history in enumerate(stage.expected)
        for number in range(len(naive_episodes(history.rows)))
    }
    assert recorded.keys() == {identity for identity in every if is_selected(*identity, 0.4)}
    assert 0 < len(recorded) < len(every)
    assert run.notes == []


def test_an_episode_that_does_not_fit_is_dropped_whole_and_its_memory_returned():
    columns = {"reward": ArraySpec((), "float32"), "observation/o": ArraySpec((1000,), "uint8")}
    budget = Budget(100_000)
    builder = EpisodeBuilder(np.arange(2), columns, 1.0, budget)

    def rows(start, terminated=False):
        return {
            "reward": np.ones(2, np.float32),
            "obs:o": np.zeros((2, 1000), np.uint8),
            "start": np.array([start, start or terminated]),
            "final": np.zeros(2, bool),
            "terminated": np.array([False, terminated]),
        }

    ids = np.arange(2)
    ended = builder.add(ids, rows(True))
    for step in range(200):  # 2 x 200 kB: neither fits while both run
        ended += builder.add(ids, rows(False, terminated=step % 10 == 9))
    ended += builder.finish()
    # Environment 0's endless episode is dropped; environment 1's of 10 steps (10 kB) are kept.
    assert builder.dropped == 1 + 20 - len(
        [e for e in ended if e.env_id == 1 and e.ending[0] == "t"]
    )
    assert {episode.env_id for episode in ended} == {1}
    for episode in ended:
        budget.give(episode.nbytes)
    assert budget.take(100_000)


def notes_of(path):
    run = Run(path)
    assert run.segments
    return run.notes


@pytest.mark.parametrize("columns", [{}, {"observation/o": ArraySpec((100_000,), "uint8")}])
def test_an_episode_without_a_result_is_no_episode_and_keeps_no_memory(columns):
    """It is interrupted after one row; with wide rows that row is in its chunk already."""
    budget = Budget(200_000)
    columns = {"reward": ArraySpec((), "float32"), **columns}
    builder = EpisodeBuilder(np.arange(1), columns, 1.0, budget)
    rows = {
        "reward": np.ones(1, np.float32),
        "obs:o": np.zeros((1, 100_000), np.uint8),
        "start": np.array([True]),
        "final": np.array([False]),
        "terminated": np.array([False]),
    }
    for _ in range(5):  # each start interrupts the episode before
        assert builder.add(np.arange(1), rows) == []
    assert builder.finish() == []
    assert builder.dropped == 0
    assert budget.take(200_000)


def test_recording_ends_before_max_bytes_and_training_is_not_told(tmp_path):
    folder = tmp_path / "trajectories" / "inference-0-0"
    stage, recorder = recorded_stage(
        folder, "terminating", steps=2000, max_bytes=900_000, segment_bytes=200_000
    )
    files = list(folder.iterdir())
    assert sum(path.stat().st_size for path in files) <= 900_000
    assert all(path.suffix == ".h5" for path in files)
    assert any("had reached recording.max_bytes" in note for note in notes_of(tmp_path))
    episodes = sum(len(naive_episodes(history.rows)) for history in stage.expected)
    assert recorder.recorded + recorder.dropped == episodes
    assert recorder.dropped > 0
    assert len(Run(tmp_path).episodes()) == recorder.recorded


def test_a_disk_error_ends_the_recording_only(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcrl.recording.segment._extend", full)
    folder = tmp_path / "trajectories" / "inference-0-0"
    stage, recorder = recorded_stage(folder, "terminating", steps=3000)
    assert recorder.recorded == 0 or recorder.dropped > 0
    assert stage.unrolls


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
    expected = {
        (env_id, number): episode
        for env_id, history in enumerate(stage.expected)
        for number, episode in enumerate(naive_episodes(history.rows))
    }
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


def test_atari_frames_and_rewards_are_replayed_from_recorded_actions_and_seeds(tmp_path):
    options = {"repeat_action_probability": 0.0, "life_loss": True, "noop_max": 30}
    seeds = [7, 8]
    envs = make("atari:Breakout", 2, seeds, options)
    spec = EnvSpec.from_json(envs.spec)
    brain = brain_of(spec, network={"hidden_sizes": [8], "torso": "nature_cnn"})
    stage_policy = acting_policy(brain, spec)
    folder = tmp_path / "trajectories" / "inference-0-0"
    recorder = recorder_for(folder, spec, brain.behaviour, 2)
    stage_policy.sink = recorder
    batch = envs.reset()
    for _ in range(250):
        actions = stage_policy.act(rows_of(batch, [0, 1]))
        stage_policy.record()
        batch = envs.step(actions)
    recorder.close()
    envs.close()
    run = Run(tmp_path)
    table = run.episodes()
    assert table["complete"].sum() >= 4
    for env_id, seed in enumerate(seeds):
        again = make("atari:Breakout", 1, [seed], options)
        batch = again.reset()
        for row in table.index[table["env_id"] == env_id]:
            steps = run.episode(int(row))
            for t, action in enumerate(steps["action"]):
                np.testing.assert_array_equal(
                    steps["observation/obs"][t], batch.observation["obs"][0]
                )
                batch = again.step(action[None])
                assert batch.reward[0] == steps["reward"][t]
                assert batch.terminated[0] == steps["terminated"][t]
        again.close()


def acting_policy(brain, spec):
    from hpcrl.acting.policy import ActingPolicy
    from hpcrl.comm.wire import unroll_layout

    layout = unroll_layout(spec, brain.behaviour, 4, 0)
    policy = ActingPolicy(brain, spec, layout, 4, np.arange(2), CPU, "float32", seed=1)
    policy.load(weights(brain, 3), 0)
    return policy
