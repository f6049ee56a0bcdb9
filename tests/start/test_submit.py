"""The rendered batch script, compared with files that a person has read."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcrl.cli import main
from hpcrl.start.submit import JobRequest, SubmitError, find_home, render

GOLDEN = Path(__file__).parent.parent / "golden"
SLURM = Path(__file__).parents[2] / "slurm"
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
        ({"gpus_per_node": -1}, "gpus_per_node must be at least 0, got -1"),
        ({"lead_s": -5}, "lead_s must be at least 1, got -5"),
        ({"time": "2"}, "lead_s 300 is not below the wall limit 2 [(]120 s[)]"),
        ({"time": "4:59"}, "wall limit 4:59 [(]299 s[)]"),
        ({"time": "1:00:00", "lead_s": 3600}, "wall limit 1:00:00 [(]3600 s[)]"),
        ({"time": "1-1", "lead_s": 90_000}, "wall limit 1-1 [(]90000 s[)]"),
        ({"time": "0-1:01:01", "lead_s": 3661}, "[(]3661 s[)]"),
        ({"time": "0"}, "time '0' is no limit"),
        ({"time": "tomorrow"}, "'tomorrow' is no time of sbatch"),
        ({"sbatch": ("--x\nrm",)}, "is no option of sbatch"),
        ({"sbatch": ("gpu",)}, "'gpu' is no option of sbatch"),
    ],
)
def test_what_is_no_job_is_refused(change, message):
    with pytest.raises(SubmitError, match=message):
        render(replace(PLAIN, **change), "/opt/hpcrl")


@pytest.mark.parametrize("time", ["6", "5:01", "0:05:01", "1-0", "0-0:06", "0-0:05:01"])
def test_a_lead_below_the_wall_limit_is_taken(time):
    assert f"#SBATCH --time={time}\n" in render(replace(PLAIN, time=time), "/opt/hpcrl")


def test_the_batch_scripts_are_looked_for_where_they_may_be(tmp_path, monkeypatch):
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout, elsewhere):
        (folder / "slurm").mkdir(parents=True)
        (folder / "slurm" / "lib.sh").touch()
    installed = tmp_path / "site-packages"
    monkeypatch.chdir(tmp_path)
    assert find_home({}, checkout) == checkout
    assert find_home({"HPCRL_HOME": str(elsewhere)}, checkout) == elsewhere
    with pytest.raises(SubmitError, match=rf"no slurm/lib\.sh in {installed} or .*HPCRL_HOME"):
        find_home({}, installed)
    with pytest.raises(SubmitError, match=r"no slurm/lib\.sh in /nowhere:"):
        find_home({"HPCRL_HOME": "/nowhere"}, checkout)
    monkeypatch.chdir(elsewhere)
    assert find_home({}, installed) == elsewhere
    offline = tmp_path / "env" / "share" / "hpcrl"
    offline.parent.mkdir(parents=True)
    checkout.rename(offline)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    assert find_home({}, installed) == offline


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.name)
def test_every_batch_script_asks_for_what_its_requeues_rest_on(script):
    """Asked to stop five minutes before the wall limit, requeued, and with one output for all."""
    text = script.read_text()
    options = re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE)
    to_the_shell = "B:" * ("mpirun" in script.name)
    assert f"--signal={to_the_shell}USR2@300" in options
    assert {"--requeue", "--open-mode=append"} <= set(options)
    assert not any(option.startswith(("--gpus-per-task", "--gres")) for option in options)
    assert ("--no-kill" in options) == (script.name in ("train.sbatch", "train_array.sbatch"))
    assert "\nset -euo pipefail\n" in text


def test_a_python_of_its_own_is_told_to_the_job():
    lines = render(PLAIN, "/opt/hpcrl", "/a b/python").splitlines()
    assert lines[lines.index("export HPCRL_HOME=/opt/hpcrl") + 1] == (
        "export HPCRL_PYTHON='/a b/python'"
    )


def test_the_python_of_a_container_gets_all_arguments_and_the_options(tmp_path):
    """The stand-in takes the place of apptainer, and shows how it was called."""
    stand_in = tmp_path / "apptainer"
    stand_in.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stand_in.chmod(0o755)
    script = SLURM / "install" / "container_python.sh"
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HPCRL_CONTAINER_OPTIONS": "--nv --bind /a"}

    def run(**more):
        return subprocess.run(
            [script, "-m", "hpcrl", "a b"], env=environ | more, capture_output=True, text=True
        )

    called = run(HPCRL_IMAGE="my image.sif").stdout.splitlines()
    assert called == [
        "exec",
        "--nv",
        "--bind",
        "/a",
        "my image.sif",
        "python",
        "-m",
        "hpcrl",
        "a b",
    ]
    refused = run()
    assert refused.returncode != 0
    assert "HPCRL_IMAGE: set it to the image" in refused.stderr


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
