"""The private cluster leaves nothing behind, however it ends."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.mpi_runner import ROOT

pytestmark = pytest.mark.timeout(150)


def test_the_daemons_end_with_who_started_them():
    command = [sys.executable, str(ROOT / "slurm" / "testcluster.py"), "--nodes", "1", "--"]
    owner = subprocess.Popen(
        [*command, "sh", "-c", "echo up; exec sleep 1000"], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "up\n"
    children = {child.name(): child for child in psutil.Process(owner.pid).children()}
    daemons = [children[name] for name in ("munged", "slurmctld", "slurmd")]
    owner.kill()
    owner.wait()
    children["sleep"].kill()
    end_s = time.monotonic() + 60.0
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in daemons):
        assert time.monotonic() < end_s, daemons
        time.sleep(0.1)
