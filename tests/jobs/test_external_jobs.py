"""Jobs that train on a simulator outside of hpcrl, through the client in C."""

import subprocess

import pytest

from hpcrl.exit_codes import DONE, USAGE
from tests.job_runner import run_to_end, status_of
from tests.mpi_runner import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = ROOT / "configs" / "external_simulator.yaml"


def write_config(tmp_path):
    """The example's configuration in a folder of its own, and the run directory."""
    path = tmp_path / "job.yaml"
    path.write_text(CONFIG.read_text(encoding="utf-8"))
    return path, tmp_path / "run"


def test_the_example_trains_through_the_client_in_c(tmp_path):
    program = tmp_path / "pole_simulator"
    source = ROOT / "env_wrappers" / "examples" / "pole_simulator.c"
    subprocess.run(["gcc", "-O2", "-o", program, source, "-lm"], check=True, timeout=100)
    config, run_dir = write_config(tmp_path)
    code, output = run_to_end(
        config,
        *("--run.dir", run_dir),
        *("--env.options.command", f"[{program}]"),
        *("--stop.agent_steps", 20_000),
        timeout_s=250,
    )
    assert code == DONE, output
    status = status_of(run_dir)
    assert status["verdict"] == "stop.agent_steps 20000 reached"
    assert not any(status["env_restarts"].values())
    assert status["mean_return_100"] > 30  # random play gets 22


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_simulator_that_does_not_come_ends_the_start_with_a_message(tmp_path, isolation):
    config, run_dir = write_config(tmp_path)
    code, output = run_to_end(
        config,
        *("--run.dir", run_dir),
        *("--env.isolation", isolation),
        *("--env.options.command", "['false']"),
    )
    assert code == USAGE, output
    assert "external:pole: 0 of 8 simulators connected to" in output
    assert "programs ended, exit codes [1]" in output
    assert "Traceback" not in output
