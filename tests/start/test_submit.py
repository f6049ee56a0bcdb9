"""The rendered batch script, compared with files that a person has read."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcrl.cli import main
from hpcrl.start.submit import JobRequest, SubmitError, render

GOLDEN = Path(__file__).parent.parent / "golden"
PLAIN = JobRequest("configs/cartpole_vtrace.yaml", 1, "1:00:00", 16)
GPU = JobRequest(
    config="configs/breakout_vtrace.yaml",
    nodes=4,
    time="2-00",
    ranks_per_node=32,
    gpus_per_node=4,
    cpus_per_rank=2,
    site="infiniband_openmpi",
    lead_s=600,
    overrides=("--run.dir", "/scratch/my run; rm -rf /"),
    sbatch=("--partition=gpu",),
)


@pytest.mark.parametrize(
    ("request_", "home", "name"),
    [
        (PLAIN, "/opt/hpcrl", "submit_plain.sbatch"),
        (GPU, "/home/a user/hpcrl", "submit_gpu.sbatch"),
    ],
)
def test_script_is_the_golden_one(request_, home, name):
    assert render(request_, home) == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"ranks_per_node": -2}, "ranks_per_node must be at least 1, got -2"),
        ({"time": "tomorrow"}, "'tomorrow' is no time of sbatch"),
        ({"sbatch": ("--x\nrm",)}, "is no option of sbatch"),
        ({"sbatch": ("gpu",)}, "'gpu' is no option of sbatch"),
    ],
)
def test_what_is_no_job_is_refused(change, message):
    with pytest.raises(SubmitError, match=message):
        render(replace(PLAIN, **change), "/opt/hpcrl")


def test_nothing_is_submitted_unless_asked(tmp_path, monkeypatch):
    called = tmp_path / "called"
    fake = tmp_path / "sbatch"
    fake.write_text(f"#!/bin/sh\ncat >{called}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    command = ["submit", "configs/cartpole_vtrace.yaml", "--time", "10", "--nodes", "2"]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0
    assert "#SBATCH --nodes=2" in shown.output
    assert not called.exists()
    assert CliRunner().invoke(main, [*command, "--submit", "--dry-run"]).exit_code == 0
    assert not called.exists()
    assert CliRunner().invoke(main, [*command, "--submit"]).exit_code == 0
    assert called.read_text() == shown.output


def test_an_unknown_key_is_found_before_the_queue():
    command = ["submit", "configs/cartpole_vtrace.yaml", "--time", "10", "--learner.foo", "1"]
    assert CliRunner().invoke(main, command).exit_code == 2


@pytest.mark.parametrize("site", ["absent", "./absent.sh"])
def test_a_missing_site_file_is_found_before_the_queue(site):
    command = ["submit", "configs/cartpole_vtrace.yaml", "--time", "10", "--site", site]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "absent.sh: give a path with a slash, or one of ethernet, " in result.output
    for there in ("ethernet", "slurm/sites/ethernet.sh"):
        assert CliRunner().invoke(main, [*command[:-1], there]).exit_code == 0
