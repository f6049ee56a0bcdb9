"""docs/your-environment.md does what it says: its files are written and its commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.run.run_dir import RunDir

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "your-environment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+) (\S+)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_files_and_commands():
    assert [info for _, info, _ in BLOCKS] == [
        "file=thermostat.py",
        "file=thermostat.yaml",
        "run",
        "run",
    ]
    (simulator,) = [text for kind, _, text in BLOCKS if kind == "python"]
    assert simulator.count("\n") <= 35


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_leads_to_a_trained_agent(tmp_path):
    (tmp_path / "hpcrl").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcrl "$@"\n')
    (tmp_path / "hpcrl").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    output = ""
    for _, info, text in BLOCKS:
        if info.startswith("file="):
            (tmp_path / info.removeprefix("file=")).write_text(text)
            continue
        result = subprocess.run(
            ["bash", "-ec", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        output += result.stdout
    for run in ("thermostat", "isolated"):
        status = RunDir(tmp_path / "runs" / run).read_status()
        assert status["verdict"].startswith("stop.mean_return 80")
    mean_return = float(re.findall(r"mean return +│ ([\d.]+)", output)[-1])
    assert mean_return > 70
