"""`layout: replay` over real MPI: two learners are stopped or killed, and one or two go on."""

import json
import signal

import pytest
import yaml

from hpcrl.run.checkpoint import load_latest
from hpcrl.run.metrics import read_metrics
from tests.job_runner import TrainingJob, run_to_end, status_of

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

CONFIG = {
    "layout": "replay",
    "env": {"name": "synthetic:recall", "envs_per_actor": 4, "groups": 2},
    "topology": {"learners": 2, "inference": 2, "actors": 2},
    "agent": {"name": "r2d2", "burn_in_steps": 3, "num_steps": 2, "head_size": 8},
    "network": {"hidden_sizes": [8], "core": "lstm", "core_size": 8},
    "learner": {"batch_unrolls": 8, "unroll_steps": 10},
    "replay": {"capacity_unrolls": 400, "min_size_unrolls": 40, "ratio": 0.75},
    "stop": {"agent_steps": 1_000_000},
    "metrics": {"every_s": 0.2, "tensorboard": False},
    "checkpoint": {"every_s": 0, "replay": "shared"},
    "transport": {"deadline_s": 60.0},
}


@pytest.mark.parametrize("learners", [1, 2])
def test_a_stopped_run_goes_on_with_its_replay_on_one_or_two_learners(tmp_path, learners):
    run_dir, path = tmp_path / "run", tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run": {"dir": str(run_dir)}}))
    with TrainingJob(path) as job:
        job.wait_until(lambda: len(read_metrics(run_dir)) >= 5, "metrics")
        job.signal(signal.SIGTERM)
        assert job.finish() == 75
    at_stop = status_of(run_dir)["counters"]
    assert stored_unrolls(run_dir) == set_of(run_dir)["unrolls"]
    assert set_of(run_dir)["learner_steps"] == at_stop["learner_steps"]
    go_on(path, run_dir, at_stop, learners)


@pytest.mark.parametrize(("learners", "kind"), [(1, "shared"), (2, "shared"), (2, "node_local")])
def test_a_killed_run_goes_on_with_the_replay_of_its_last_whole_set(
    tmp_path, monkeypatch, learners, kind
):
    run_dir, path, local = tmp_path / "run", tmp_path / "job.yaml", tmp_path / "local"
    local.mkdir()
    monkeypatch.setenv("TMPDIR", str(local))
    config = {**CONFIG, "run": {"dir": str(run_dir)}}
    config["checkpoint"] = {"every_s": 1.0, "replay": kind}
    path.write_text(yaml.safe_dump(config))
    with TrainingJob(path) as job:
        job.wait_until(lambda: _has_later_set(run_dir), "a set after the first")
        job.kill()
    shard_set = set_of(run_dir)
    folder = run_dir / "replay" if kind == "shared" else next(local.glob("hpcrl-*"))
    assert stored_unrolls(folder, shard_set["learner_steps"]) == shard_set["unrolls"]
    checkpoint = load_latest(run_dir)
    # The replay is of the checkpoint or of one before, never of a later one.
    assert 0 < shard_set["learner_steps"] <= checkpoint.step
    go_on(path, run_dir, checkpoint.state["counters"], learners)


def _has_later_set(run_dir):
    sets = list((run_dir / "replay").glob("step-*.json"))
    first = run_dir / "first"
    if sets and not first.exists():
        first.write_text(sets[0].name)
    return bool(sets) and sets[-1].name != first.read_text()


def set_of(run_dir):
    """The newest record of a set of shards."""
    return json.loads(max((run_dir / "replay").glob("step-*.json")).read_text())


def stored_unrolls(folder, step=None):
    name = "step-*" if step is None else f"step-{step:012d}"
    files = list(folder.rglob(f"{name}/shard-*.replay"))
    assert len(files) == 2
    return sum(int(_header(file)["num_unrolls"]) for file in files)


def go_on(path, run_dir, at_stop, learners):
    """Resume; counters go on from `at_stop`, and the replay is that of the newest set."""
    stored = set_of(run_dir)["unrolls"]
    code, output = run_to_end(
        path,
        "--stop.agent_steps",
        at_stop["agent_steps"] + 2000,
        "--topology.learners",
        learners,
        "--topology.inference",
        learners,
    )
    assert code == 0, output
    restored = [line for line in output.splitlines() if ": restored " in line]
    assert len(restored) == learners
    numbers = [int(line.split("restored ")[1].split()[0].replace(",", "")) for line in restored]
    assert sum(numbers) == stored
    counters = status_of(run_dir)["counters"]
    assert counters["learner_steps"] > at_stop["learner_steps"]
    assert counters["agent_steps"] >= at_stop["agent_steps"] + 2000
    # 8 items for every 8 / 0.75 unrolls of 10 steps: 106.7 agent steps, all of them real. The
    # replay was full enough to begin at once, and no more than two batches are on credit.
    steps = counters["learner_steps"] - at_stop["learner_steps"]
    stored_steps = counters["agent_steps"] - at_stop["agent_steps"]
    assert steps == pytest.approx(stored_steps / (10 * 8 / 0.75), abs=3)


def _header(path):
    data = path.read_bytes()
    start = len(b"hpcrl-replay\n")
    length = int.from_bytes(data[start : start + 8], "little")
    return json.loads(data[start + 8 : start + 8 + length])
