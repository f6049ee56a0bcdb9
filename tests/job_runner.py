"""Starts `hpcrl train` as a user does, and knows every process that came of it."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from tests.mpi_runner import ROOT


class TrainingJob:
    """One `hpcrl train`, or another program that starts one.

    Use it as a context manager: whatever is left of the job at the end is killed.
    """

    _MARK = "HPCRL_TEST_JOB"
    process: Any

    def __init__(self, config, *overrides, env=None, program=("-m", "hpcrl", "train"), cwd=ROOT):
        self._mark = uuid.uuid4().hex
        self._log = Path(config).with_name(f"output-{self._mark[:8]}.txt")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(config), *map(str, overrides)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    self._MARK: self._mark,
                    **(env or {}),
                },
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
        if exception[0] is not None:
            print(self.output)

    @property
    def output(self):
        return self._log.read_text(errors="replace")

    def processes(self):
        """All live processes of the job: they inherited the mark. Zombies have no environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(self._MARK) == self._mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def signal(self, number):
        """Signal the process that the user started."""
        self.process.send_signal(number)

    def kill(self):
        """SIGKILL to every process of the job."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=30)

    def finish(self, timeout_s=100.0):
        """Wait for the end and return the exit code; no process may be left then."""
        code = self.process.wait(timeout=timeout_s)
        end = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, f"left over: {[process.cmdline() for process in left]}"
        return code

    def wait_until(self, condition, what, timeout_s=90.0):
        """Poll until `condition()` holds while the job is alive."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < end, f"no {what} in {timeout_s} s:\n{self.output}"
            time.sleep(0.02)


def run_to_end(config, *overrides, timeout_s=100.0, **arguments):
    """Exit code and output of a job."""
    with TrainingJob(config, *overrides, **arguments) as job:
        code = job.finish(timeout_s)
    return code, job.output


def status_of(run_dir):
    """STATUS.json, {} where there is none yet."""
    path = Path(run_dir) / "STATUS.json"
    return json.loads(path.read_text()) if path.exists() else {}
