"""HDF5 crashes a process that frees what it could not close; a full disk must not do that to us."""

import subprocess
import sys

import h5py
import pytest

from tests.mpi_runner import ROOT

SCRIPT = """
import gc, os, sys
from pathlib import Path
import numpy as np
from hpcrl.recording import segment
from hpcrl.specs import ArraySpec

when, folder, now_s = sys.argv[1], Path(sys.argv[2]), [0.0]
columns = {"reward": ArraySpec((), "float32"), "observation/obs": ArraySpec((64,), "float32")}
entry = dict.fromkeys(set(segment.EPISODE_COLUMNS) - {"start", "length", "final"}, 0)

def fill_up(file):
    os.dup2(os.open("/dev/full", os.O_RDWR), file.id.get_vfd_handle())

def append(writer):
    now_s[0] += 2 * segment.FLUSH_S
    steps = {"reward": [np.ones(3000, np.float32)]}
    writer.append({**steps, "observation/obs": [np.ones((3000, 64), np.float32)]}, None, entry)

def record():
    writer = segment.SegmentWriter(folder / "seg-0.h5", columns, {}, "gzip-1", lambda: now_s[0])
    for _ in range(5):
        append(writer)
    try:
        fill_up(writer._file)
        if when == "write":
            for _ in range(50):
                append(writer)
        writer.close("finished", {})
    except (OSError, RuntimeError, ValueError) as error:
        print("failed:", error)
        writer.abandon()

record()
gc.collect()
print("alive")
"""


@pytest.mark.parametrize("when", ["write", "close"])
def test_a_disk_that_fills_up_costs_the_recording_and_not_the_process(tmp_path, when):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when, str(tmp_path)],
        capture_output=True, text=True, timeout=100, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "failed:" in done.stdout
    assert done.stdout.endswith("alive\n")
    with h5py.File(tmp_path / "seg-0.h5.part", swmr=True) as file:
        rows = len(file["steps/reward"])
        assert rows >= 3 * 3000
        assert file["episodes/length"][:].sum() <= rows
