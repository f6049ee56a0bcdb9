import errno
import json
import os

import numpy as np
import pytest
import yaml

from hpcrl.config.load import config_hash, flatten, known_keys, parse_config, to_dict, to_yaml
from hpcrl.durable import atomic_write
from hpcrl.run import resume, run_dir
from hpcrl.run.checkpoint import CheckpointError, Snapshot, list_checkpoints, save_checkpoint
from hpcrl.run.counters import Counters
from hpcrl.run.metrics import MetricsWriter, read_metrics
from hpcrl.run.resume import MAY_CHANGE, RunIsDone, changed_keys, check_not_done, open_run
from hpcrl.run.run_dir import RunDirError

CONFIG = {
    "run": {"seed": 1},
    "env": {"name": "gym:CartPole-v1", "options": {}, "groups": 2},
    "learner": {"optimizer": {"learning_rate": 0.1}, "threads": 0},
}

FREE_SECTIONS = (
    "run",
    "topology",
    "stop",
    "checkpoint",
    "metrics",
    "transport",
    "inference",
    "recording",
    "evaluation",
)
FREE_KEYS = (
    "learner.backend",
    "learner.threads",
    "learner.compile",
    "learner.queue_unrolls",
    "learner.micro_batches",
    "learner.max_policy_lag",
    "learner.stale_unrolls",
    "learner.max_gradient_lag",
    "env.envs_per_actor",
    "env.groups",
    "env.ranks_per_env",
    "env.isolation",
    "env.python",
    "env.step_timeout_s",
    "env.start_timeout_s",
    "env.max_restarts_per_hour",
    "replay.capacity_unrolls",
    "replay.compression",
    "replay.memory_bytes",
)


def start(path, resume="auto", **changes):
    """Open a run; changes are dotted keys with `__` for the dot."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = config
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return open_run(path, yaml.safe_dump(config, sort_keys=False), "0123456789abcdef", resume)


def train(opened, steps):
    """Write a record per learner step, and a checkpoint where the step is a multiple of 10."""
    writer = MetricsWriter(opened.run_dir.path, opened.restart, tensorboard=False)
    for step in steps:
        writer.write(Counters(step), {})
        if step % 10 == 0:
            tensors = {"w": np.full(4, step)}
            save_checkpoint(opened.run_dir.path, Snapshot(step, tensors, {"step": step}), keep=3)
    writer.close()


def restarts_of(path):
    return [(r["learner_steps"], r["restart"]) for r in read_metrics(path)]


def test_a_new_run_is_restart_0_at_the_beginning(tmp_path):
    opened = start(tmp_path / "run")
    assert (opened.restart, opened.checkpoint, opened.previous_status) == (0, None, None)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == CONFIG
    assert "0123456789abcdef" in (tmp_path / "run" / "config.yaml").read_text().splitlines()[0]
    status = opened.run_dir.read_status()
    assert (status["state"], status["restart"], status["resumed_learner_step"]) == (
        "starting",
        0,
        0,
    )


def test_a_killed_run_goes_on_at_its_checkpoint_with_a_continuous_curve(tmp_path):
    train(start(tmp_path), range(1, 14))
    opened = start(tmp_path)
    assert (opened.restart, opened.checkpoint.step) == (1, 10)
    assert opened.run_dir.read_status()["resumed_learner_step"] == 10
    assert any("3 records" in message for message in opened.messages)
    train(opened, range(11, 26))
    opened = start(tmp_path)
    assert (opened.restart, opened.checkpoint.state) == (2, {"step": 20})
    train(opened, range(21, 31))
    expected = [(s, 0) for s in range(1, 11)] + [(s, 1) for s in range(11, 21)]
    assert restarts_of(tmp_path) == expected + [(s, 2) for s in range(21, 31)]


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_under_any_config(tmp_path):
    train(start(tmp_path), range(1, 5))
    opened = start(tmp_path, env__name="gym:Acrobot-v1")
    assert (opened.restart, opened.checkpoint) == (1, None)
    train(opened, range(1, 3))
    assert restarts_of(tmp_path) == [(1, 1), (2, 1)]
    assert len((tmp_path / "metrics.discarded.jsonl").read_text().splitlines()) == 4


def test_never_refuses_a_directory_that_holds_a_run_and_changes_nothing(tmp_path):
    assert start(tmp_path, "never").restart == 0
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(RunDirError, match=r"already holds a run.*--run\.dir.*auto"):
        start(tmp_path, "never")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())


def test_a_directory_with_other_files_is_not_a_run(tmp_path):
    (tmp_path / "slurm-1.out").write_text("")
    assert start(tmp_path, "never").restart == 0


def test_an_older_checkpoint_by_path_sets_the_newer_future_aside(tmp_path):
    train(start(tmp_path), range(1, 31))
    older = tmp_path / "checkpoints" / "step-000000000010"
    opened = start(tmp_path, str(older))
    assert (opened.restart, opened.checkpoint.step) == (1, 10)
    train(opened, range(11, 13))
    opened = start(tmp_path, "auto")
    assert (opened.restart, opened.checkpoint.step) == (2, 10)
    assert restarts_of(tmp_path) == [(step, 0) for step in range(1, 11)]
    assert (tmp_path / "checkpoints" / "aside-step-000000000030").is_dir()


def test_a_checkpoint_of_another_run_starts_a_new_run_from_it(tmp_path):
    train(start(tmp_path / "a"), range(1, 12))
    path = tmp_path / "a" / "checkpoints" / "step-000000000010"
    opened = start(tmp_path / "b", str(path))
    assert (opened.restart, opened.checkpoint.step) == (0, 10)
    assert restarts_of(tmp_path / "b") == []
    train(opened, range(11, 21))
    with pytest.raises(RunDirError, match="checkpoints of its own"):
        start(tmp_path / "b", str(path))
    assert start(tmp_path / "b").checkpoint.step == 20


def test_a_relative_path_is_the_same_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(start("run"), range(1, 14))
    assert start("run", "run/checkpoints/step-000000000010").checkpoint.step == 10
    assert len(restarts_of(tmp_path / "run")) == 10
    assert start("run").checkpoint.step == 10
    assert len(restarts_of(tmp_path / "run")) == 10


@pytest.mark.parametrize(
    ("resume", "message"),
    [("atuo", "atuo is neither auto, never nor"), ("other", "is a run directory; give one of")],
)
def test_a_wrong_path_is_explained(tmp_path, monkeypatch, resume, message):
    monkeypatch.chdir(tmp_path)
    start(tmp_path / "other")
    with pytest.raises(RunDirError, match=message):
        start(tmp_path / "run", resume)
    with pytest.raises(CheckpointError, match=r"can't read manifest\.json"):
        start(tmp_path / "run", "other/checkpoints")


def test_a_damaged_newest_checkpoint_is_passed_over_said_and_set_aside(tmp_path):
    train(start(tmp_path), range(1, 25))
    (tmp_path / "checkpoints" / "step-000000000020" / "state.json").write_text("")
    opened = start(tmp_path)
    assert opened.checkpoint.step == 10
    assert any("state.json has 0 bytes" in message for message in opened.messages)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10]
    assert len(restarts_of(tmp_path)) == 10


def test_what_may_change_is_noted_and_the_old_configuration_kept(tmp_path):
    train(start(tmp_path), range(1, 12))
    train(start(tmp_path), ())
    opened = start(tmp_path, learner__threads=2, env__groups=1)
    assert any("learner.threads: 0 -> 2" in message for message in opened.messages)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["learner"]["threads"] == 2
    kept = yaml.safe_load((tmp_path / "config.restart-1.yaml").read_text())
    assert kept == CONFIG
    assert not (tmp_path / "config.restart-0.yaml").exists()


def test_what_may_not_change_names_key_old_and_new_value(tmp_path):
    train(start(tmp_path), range(1, 12))
    with pytest.raises(RunDirError) as error:
        start(tmp_path, learner__optimizer={"learning_rate": 0.2}, env__options={"a": 1}, x=3)
    message = str(error.value)
    assert "learner.optimizer.learning_rate was 0.1, is 0.2" in message
    assert "env.options was {}, is 'absent'" in message
    assert "env.options.a was 'absent', is 1" in message
    assert "x was 'absent', is 3" in message
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == CONFIG
    assert len(restarts_of(tmp_path)) == 11
    assert start(tmp_path).restart == 1


def test_every_key_that_may_change_exists_and_the_rest_is_refused():
    keys = known_keys()
    for prefix in MAY_CHANGE:
        assert any(key.startswith(prefix) for key in keys), prefix
    flat = flatten(to_dict(parse_config({})))
    for key in flat:
        allowed, refused = changed_keys(flat, {**flat, key: "changed"})
        may = key in FREE_KEYS or key.split(".")[0] in FREE_SECTIONS
        assert (list(allowed), list(refused)) == (([key], []) if may else ([], [key]))


def test_the_hash_of_a_run_ignores_what_may_change():
    one = config_hash(parse_config({}), MAY_CHANGE)
    assert config_hash(parse_config({"run": {"seed": 5}}), MAY_CHANGE) == one
    assert config_hash(parse_config({"env": {"name": "gym:Acrobot-v1"}}), MAY_CHANGE) != one


def test_litter_of_killed_writers_is_removed(tmp_path):
    opened = start(tmp_path)
    litter = opened.run_dir.checkpoints / "tmp-step-000000000003"
    litter.mkdir()
    (litter / "state.json").write_text("")
    start(tmp_path)
    assert os.listdir(opened.run_dir.checkpoints) == []


def test_a_finished_run_is_over_only_under_its_own_stop_conditions(tmp_path):
    def config_of(frames, resume="auto"):
        run = {"dir": str(tmp_path), "resume": resume}
        return parse_config({"run": run, "stop": {"frames": frames}})

    check_not_done(config_of(100))
    opened = open_run(tmp_path, to_yaml(config_of(100)), "0123456789abcdef", "auto")
    check_not_done(config_of(100))
    opened.run_dir.update_status(state="done", verdict="stop.frames 100 reached")
    with pytest.raises(RunIsDone, match=r"is done \(stop.frames 100 reached\): nothing to do"):
        check_not_done(config_of(100))
    check_not_done(config_of(200))
    check_not_done(config_of(100, resume="never"))


def test_a_start_cut_off_while_it_takes_new_stop_conditions_is_not_over_by_them(
    tmp_path, monkeypatch
):
    def config_of(frames):
        return parse_config({"run": {"dir": str(tmp_path)}, "stop": {"frames": frames}})

    opened = open_run(tmp_path, to_yaml(config_of(100)), "0123456789abcdef", "auto")
    opened.run_dir.update_status(state="done", verdict="stop.frames 100 reached")
    cut = 0
    while True:
        writes = 0

        def write(path, text, cut=cut):
            nonlocal writes
            if writes == cut:
                raise OSError(errno.ENOSPC, "No space left on device")
            writes += 1
            atomic_write(path, text)

        for module in (resume, run_dir):
            monkeypatch.setattr(module, "atomic_write", write)
        try:
            open_run(tmp_path, to_yaml(config_of(200)), "0123456789abcdef", "auto")
            break
        except (RunDirError, OSError):
            check_not_done(config_of(200))
        cut += 1
    assert cut >= 3  # STATUS.json, the old configuration and the new one
