import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.run.checkpoint import (
    CheckpointError,
    Snapshot,
    list_checkpoints,
    load_latest,
    load_path,
    save_checkpoint,
    set_aside_newer,
)


def save(run_dir, step, keep=3, **extra_files):
    tensors = {"weights": np.full(1000, step, np.float32)}
    return save_checkpoint(run_dir, Snapshot(step, tensors, {"step": step}, extra_files), keep)


def steps(run_dir):
    return [step for step, _ in list_checkpoints(run_dir)]


def read_safetensors(path):
    """A naive reader of the format: length of the header, JSON header, raw little-endian data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    names = {
        "F32": np.float32,
        "F64": np.float64,
        "I64": np.int64,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], names[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_everything_comes_back_as_it_was_saved(tmp_path):
    tensors = {
        "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.int64),
        "flags": np.array([True, False]),
        "torch": torch.arange(4, dtype=torch.uint8),
        "torch transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    state = {"counters": {"frames": 2**60 + 1}, "lr": 0.1, "returns": [1.0, float("inf")]}
    path = save_checkpoint(tmp_path, Snapshot(42, tensors, state), keep=1)
    loaded = load_latest(tmp_path)
    assert (loaded.step, loaded.state, loaded.path, loaded.skipped) == (42, state, path, ())
    assert path.name == "step-000000000042"
    on_disk = read_safetensors(path / "tensors.safetensors")
    assert loaded.tensors.keys() == on_disk.keys() == tensors.keys()
    for name, value in tensors.items():
        expected = np.asarray(value)
        for found in (loaded.tensors[name], on_disk[name]):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        assert loaded.tensors[name].flags.writeable


def test_the_manifest_is_written_after_all_that_it_describes_is_durable(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(source, target):
        calls.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save(tmp_path, 1, shard=lambda path: path.write_bytes(b"rows"))
    name = "step-000000000001"
    assert calls[:4] == ["state.json", "tensors.safetensors", "shard", "manifest.json"]
    assert calls[4:7] == [f"tmp-{name}", f"rename to {name}", "checkpoints"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == name + "\n"


def test_all_files_are_readable_by_whom_the_umask_lets_read(tmp_path):
    old = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_an_extra_file_is_kept_and_verified(tmp_path):
    path = save(tmp_path, 1, **{"replay-0.bin": lambda p: p.write_bytes(b"abc")})
    assert (load_path(path).path / "replay-0.bin").read_bytes() == b"abc"
    (path / "replay-0.bin").write_bytes(b"abx")
    with pytest.raises(CheckpointError, match=r"replay-0\.bin has another SHA-256"):
        load_path(path)


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "a/b", "..", ""])
def test_an_extra_file_can_not_take_a_reserved_name_or_leave_the_directory(tmp_path, name):
    with pytest.raises(ValueError, match="reserved name or a path"):
        save(tmp_path, 1, **{name: lambda path: None})


def test_the_newest_k_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [40, 30]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "latest",
        "step-000000000030",
        "step-000000000040",
    ]
    with pytest.raises(ValueError, match="keep"):
        save(tmp_path, 50, keep=0)


def test_a_newer_one_of_another_future_never_pushes_out_what_was_just_saved(tmp_path):
    save(tmp_path, 900)
    save(tmp_path, 10, keep=1)
    save(tmp_path, 20, keep=1)
    assert steps(tmp_path) == [900, 20]


def test_a_good_checkpoint_of_the_same_step_is_left_and_a_damaged_one_replaced(tmp_path):
    path = save(tmp_path, 5)
    inode = (path / "state.json").stat().st_ino
    assert save(tmp_path, 5) == path
    assert (path / "state.json").stat().st_ino == inode
    (path / "state.json").write_text("{}")
    save(tmp_path, 5)
    assert load_latest(tmp_path).state == {"step": 5}
    assert (tmp_path / "checkpoints" / "aside-step-000000000005" / "state.json").exists()


def test_without_checkpoints_there_is_nothing_to_load(tmp_path):
    assert load_latest(tmp_path) is None
    (tmp_path / "checkpoints" / "tmp-step-000000000001").mkdir(parents=True)
    assert load_latest(tmp_path) is None


FILES = ("state.json", "tensors.safetensors", "manifest.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "grown"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_is_named(tmp_path, file, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        changed = {"cut": data[: len(data) // 2], "emptied": b"", "grown": data + b"x"}
        path.write_bytes(changed[damage])
    loaded = load_latest(tmp_path)
    assert loaded.step == 1
    np.testing.assert_array_equal(loaded.tensors["weights"], np.ones(1000, np.float32))
    (message,) = loaded.skipped
    assert "step-000000000002" in message
    assert file in message


@pytest.mark.parametrize("file", FILES)
def test_no_flipped_bit_is_ever_taken_for_data(tmp_path, file):
    """The manifest's date alone has no check: what it describes still loads as it was."""
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    good = path.read_bytes()
    rng = random.Random(0)
    passed_over = 0
    for _ in range(100):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        loaded = load_latest(tmp_path)
        passed_over += loaded.step == 1
        assert loaded.state == {"step": loaded.step}
        np.testing.assert_array_equal(
            loaded.tensors["weights"], np.full(1000, loaded.step, np.float32)
        )
    assert passed_over >= (75 if file == "manifest.json" else 100)


def test_when_none_is_good_the_run_is_not_silently_started_anew(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint .*0002: .*0001: .*--run\.dir"):
        load_latest(tmp_path)


def test_a_checkpoint_of_a_later_format_is_refused_by_number(tmp_path):
    manifest = save(tmp_path, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(CheckpointError, match="schema version 2; this hpcrl reads 1"):
        load_path(manifest.parent)


def test_newer_ones_are_set_aside_without_being_lost(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert set_aside_newer(tmp_path, 1) == ["step-000000000003", "step-000000000002"]
    assert steps(tmp_path) == [1]
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").read_text() == "step-000000000001\n"
    assert load_path(folder / "aside-step-000000000003").step == 3
    save(tmp_path, 3)
    set_aside_newer(tmp_path, 1)
    assert (folder / "aside-step-000000000003-2").is_dir()


def run_child(script, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, **options
    )


def test_a_full_disk_keeps_the_last_good_one_and_says_so(tmp_path):
    """The child may write 64 kB a file; the kernel refuses more."""
    save(tmp_path, 1)
    script = (
        "import sys, pathlib, numpy as np; from hpcrl.run.checkpoint import *\n"
        "try:\n"
        "    snapshot = Snapshot(2, {'x': np.ones(10**5)}, {})\n"
        "    save_checkpoint(pathlib.Path(sys.argv[1]), snapshot, 1)\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    limit = (2**16, 2**16)
    child = run_child(
        script, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    message = child.communicate(timeout=60)[0].decode()
    assert "step 2 can't be written" in message
    assert "File too large" in message
    assert "newest one kept is of learner step 1" in message
    assert load_latest(tmp_path).step == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-000000000001"]


SAVES_FOREVER = """
import itertools, pathlib, sys
import numpy as np
from hpcrl.run.checkpoint import Snapshot, load_latest, save_checkpoint
run_dir = pathlib.Path(sys.argv[1])
found = load_latest(run_dir)
for step in itertools.count(found.step + 1 if found else 1):
    tensors = {f"t{i}": np.full(50_000, step, np.int64) for i in range(3)}
    extra = {"shard": lambda path: path.write_bytes(b"%d" % step * 10_000)}
    save_checkpoint(run_dir, Snapshot(step, tensors, {"step": step}, extra), keep=2)
    print(step, flush=True)
"""


def test_twenty_kills_at_random_times_never_lose_or_tear_a_checkpoint(tmp_path):
    """What the child reported as saved must load afterwards, whole, whenever it was killed."""
    rng, reported, torn = random.Random(0), 0, 0
    for _ in range(20):
        child = run_child(SAVES_FOREVER, tmp_path)
        assert child.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        lines = child.communicate(timeout=60)[0].split()
        reported = max([reported, *map(int, lines)])
        torn += any((tmp_path / "checkpoints").glob("tmp-*"))
        loaded = load_latest(tmp_path)
        assert loaded.skipped == ()
        assert loaded.step >= reported
        assert loaded.state == {"step": loaded.step}
        assert (loaded.path / "shard").read_bytes() == b"%d" % loaded.step * 10_000
        for index in range(3):
            np.testing.assert_array_equal(
                loaded.tensors[f"t{index}"], np.full(50_000, loaded.step, np.int64)
            )
    assert torn, "no kill hit a write, so the test shows nothing"
    save(tmp_path, reported + 1000)
    assert not any((tmp_path / "checkpoints").glob("tmp-*"))


class Killed(BaseException):
    """Stands for SIGKILL: raised at a chosen call, after which no clean-up code has an effect."""


def test_a_kill_before_any_file_operation_leaves_a_loadable_run(tmp_path, monkeypatch):
    """Every fsync, rename and removal of a save that also prunes is the last one in turn."""
    left = [0]

    def dying(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    template = tmp_path / "template"
    save(template, 1, keep=2)
    save(template, 2, keep=2)
    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    outcomes = []
    for operations in range(100):
        run_dir = tmp_path / str(operations)
        shutil.copytree(template, run_dir)
        left[0] = operations
        try:
            save(run_dir, 3, keep=2)
            outcomes.append("saved")
        except Killed:
            outcomes.append("killed")
        left[0] = 10**9
        assert [load_path(path).step for _, path in list_checkpoints(run_dir)] == steps(run_dir)
        loaded = load_latest(run_dir)
        assert loaded.step in (2, 3)
        assert loaded.step == 3 or outcomes[-1] == "killed"
        np.testing.assert_array_equal(
            loaded.tensors["weights"], np.full(1000, loaded.step, np.float32)
        )
        if outcomes[-1] == "saved":
            break
    assert outcomes.count("killed") >= 12
    assert outcomes[-1] == "saved"
