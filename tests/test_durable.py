import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcrl import durable


def test_atomic_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "STATUS.json"
    durable.atomic_write(path, "old")
    durable.atomic_write(path, b"new\xff")
    assert path.read_bytes() == b"new\xff"
    assert os.listdir(tmp_path) == ["STATUS.json"]


def test_contents_are_synced_before_the_rename_and_the_directory_after_it(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        calls.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_replace(source, target):
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    durable.atomic_write(tmp_path / "a", "x")
    assert calls == ["sync .a.tmp", "rename", f"sync {tmp_path.name}"]


def test_a_write_that_the_system_refuses_leaves_the_old_file(tmp_path):
    """The child may write 4096 bytes a file; the kernel refuses more."""
    path = tmp_path / "f"
    path.write_text("old")
    script = (
        "import sys, pathlib; from hpcrl.durable import atomic_write\n"
        "try:\n    atomic_write(pathlib.Path(sys.argv[1]), bytes(10000))\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert child.stdout == "File too large\n", child.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_json_is_strict():
    data = {"a": float("nan"), "b": [float("inf"), 1.5], "c": np.float32(0.5), 3: np.int64(7)}
    assert json.loads(durable.json_text(data)) == {"a": None, "b": [None, 1.5], "c": 0.5, "3": 7}


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError(28, "No space left on device"), "No space left on device"), (ValueError("x"), "x")],
)
def test_reason_is_the_systems_words(error, text):
    assert durable.reason(error) == text


def test_a_large_file_is_synced_in_parts_that_can_be_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_SYNC_BYTES", 2**14)
    path = tmp_path / "large"
    path.write_bytes(bytes(5 * 2**14 + 1))
    parts = []
    durable.sync_file(path, lambda: parts.append(1))
    assert len(parts) == 6
    assert path.stat().st_size == 5 * 2**14 + 1
