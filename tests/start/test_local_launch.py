"""`hpcrl train` as the parent of its own mpirun: requests, ends and codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpcrl.run.metrics import read_metrics
from hpcrl.start.local_launch import mpirun_command, run_mpirun, segments_folder
from tests.job_runner import TrainingJob, status_of
from tests.jobs.test_end_to_end import SLOW, write_config
from tests.mpi_runner import ROOT


def run(program):
    """The code that stands for an mpirun that runs `program`."""
    code = f"from hpcrl.start.local_launch import run_mpirun; import sys; sys.exit({program})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    return result.returncode


@pytest.mark.parametrize(
    ("code", "shown"), [(0, 0), (2, 2), (74, 74), (75, 75), (1, 70), (137, 70)]
)
def test_undocumented_codes_of_mpirun_are_not_shown(code, shown):
    assert run(f"run_mpirun([sys.executable, '-c', 'import sys; sys.exit({code})'], 1)") == shown


def test_an_mpirun_that_outlives_its_ranks_is_ended_and_their_outcome_counts():
    # It becomes a process without children when its only "rank" has ended.
    shell = f"sleep 1.5 & wait; exec {sys.executable} -c 'import time; time.sleep(1000)'"
    program = (
        "import hpcrl.start.local_launch as launch\n"
        "launch._LINGER_S = 2.0\n"
        f"mpirun = ['/bin/sh', '-c', {shell!r}]\n"
        "raise SystemExit(launch.run_mpirun(mpirun, 1, lambda: 75))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 75


def test_shared_memory_that_killed_ranks_leave_behind_goes_with_the_job(tmp_path):
    told = tmp_path / "told"
    shell = f"cd $OMPI_MCA_btl_sm_backing_directory; touch left; ls -d $PWD/* > {told}"
    assert run(f"run_mpirun(['/bin/sh', '-c', '{shell}'], 1)") == 0
    (left,) = set(told.read_text().split())
    assert left.endswith("/left")
    assert not Path(left).parent.exists()


def test_a_rank_that_outlives_its_mpirun_is_waited_for(tmp_path):
    told = tmp_path / "told"
    shell = f"sleep 3 & echo $! > {told}; sleep 1.5; exit 75"
    assert run(f"run_mpirun(['/bin/sh', '-c', '{shell}'], 1)") == 75
    pid = int(told.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_site_that_says_where_shared_memory_lies_is_obeyed(tmp_path):
    environ = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    with segments_folder(environ) as variables:
        assert variables == {}


def test_a_second_request_ends_the_job_with_a_documented_code():
    program = (
        "import os, signal, threading, time\n"
        "from hpcrl.start.local_launch import run_mpirun\n"
        "child = ['/bin/sh', '-c', 'trap \"\" USR2; while :; do sleep 0.1; done']\n"
        "def ask():\n"
        "    for _ in range(2):\n"
        "        time.sleep(1.0)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "raise SystemExit(run_mpirun(child, 1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 70, done.stderr


def test_a_request_before_mpirun_runs_is_kept(monkeypatch):
    class Slow(subprocess.Popen):
        def __init__(self, *arguments, **options):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    try:
        assert run_mpirun([sys.executable, "-c", "import time; time.sleep(60)"], 1) == 75
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_fault_tolerance_is_an_option_of_mpirun():
    assert "--with-ft" not in mpirun_command(sys.executable, 2, ["train"])
    command = mpirun_command(sys.executable, 2, ["train"], fault_tolerant=True)
    assert command[command.index("--with-ft") + 1] == "ulfm"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_parent_leaves_no_job_behind(tmp_path):
    config, run_dir = write_config(tmp_path, env=SLOW, stop={"agent_steps": 10**9})
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        left = [p for p in job.processes() if p.pid != job.process.pid]
        job.signal(signal.SIGKILL)
        job.process.wait(30)
        _, alive = psutil.wait_procs(left, timeout=60)
        assert not alive
    end = time.monotonic() + 10
    while status_of(run_dir)["state"] != "requeue" and time.monotonic() < end:
        time.sleep(0.1)
    assert status_of(run_dir)["state"] == "requeue"  # with a durable checkpoint
