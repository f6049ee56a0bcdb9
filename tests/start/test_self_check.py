"""`hpcrl check`: as one process, as the ranks of a job, and where something is broken."""

import os
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import pytest

import hpcrl.start.probes
from hpcrl.comm.startup import FabricError
from hpcrl.config.load import parse_config
from hpcrl.specs import ActionPart, ActionSpec, EnvSpec
from hpcrl.start import self_check
from hpcrl.start.probes import (
    Finding,
    _group_limits_bytes,
    probe_configured_environment,
    probe_environments,
    probe_file_system,
    probe_horovod,
    probe_memory,
)
from tests.loopback_runner import run_loopback
from tests.mpi_runner import run_mpi

MPI = {"library": "Test MPI, of the tests", "standard": "4.0", "thread_level": "multiple"}


def run_check(*arguments, env=None, timeout_s=100):
    return subprocess.run(
        [sys.executable, "-m", "hpcrl", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )


def lines_of(text):
    return {line.split()[1]: line for line in text.splitlines() if line}


@pytest.mark.mpi
def test_a_process_alone_is_told_what_works(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{dir: {tmp_path / 'run'}}}\nenv: {{name: synthetic:counting}}\n")
    done = run_check(str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(done.stdout)
    for subject in ("Python", "MPI", "launch", "torch", "Horovod", "environments", "memory"):
        assert subject in lines
    assert "made and stepped" in lines["synthetic:counting"]
    assert f"{len(os.sched_getaffinity(0))} on this node, ranks there: 1" in lines["cores"]
    assert f"files in {tmp_path} " in done.stdout
    assert list(tmp_path.iterdir()) == [config]  # nothing is left behind


@pytest.mark.mpi
def test_the_ranks_of_a_job_print_one_table_and_share_one_code(tmp_path):
    script = tmp_path / "check.py"
    script.write_text("from hpcrl.cli import run\nrun(['check'])\n")
    done = run_mpi(script, 3, env={"COLUMNS": "200", "HPCRL_WORLD_SIZE": "5"}, expect_code=71)
    lines = lines_of(done.stdout)
    assert len(lines) == len(done.stdout.splitlines())
    assert "FAILED" in lines["launch"]
    assert "HPCRL_WORLD_SIZE says 5 ranks, but MPI's world has 3" in lines["launch"]
    assert "a ring of 3 ranks" in lines["ranks"]
    assert "ranks there: 3" in lines["cores"]
    assert "Traceback" not in done.stderr


@pytest.mark.mpi
def test_another_number_of_slurm_tasks_than_ranks_is_a_launch_error():
    done = run_check(env={"SLURM_NTASKS": "4"})
    assert done.returncode == 71
    assert "FAILED launch" in " ".join(done.stdout.split())
    assert "SLURM_NTASKS says 4 ranks, but MPI's world has 1" in done.stdout


def test_a_bad_configuration_is_named_before_anything_starts(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("lerner: {}\n")
    done = run_check(str(config))
    assert done.returncode == 2
    assert done.stderr == ("hpcrl: unknown key lerner; did you mean learner?\n")


def fake_mpi4py(tmp_path, source):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(source)
    return {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}


def test_without_a_working_mpi_the_rest_is_still_looked_at(tmp_path):
    env = fake_mpi4py(tmp_path, "raise ImportError('libmpi.so.40: cannot open')")
    done = run_check(env=env)
    assert done.returncode == 71
    lines = lines_of(done.stdout)
    assert "FAILED" in lines["MPI"]
    assert "libmpi.so.40: cannot open" in lines["MPI"]
    assert lines["torch"].startswith("ok")


def test_a_library_that_hangs_is_ended_and_named(tmp_path, monkeypatch, capfd):
    env = fake_mpi4py(tmp_path, "import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    for deadline_s in (3.0, 30.0):  # on a busy machine it may not get there in three seconds
        assert self_check.check_command(None, deadline_s=deadline_s) == 71
        said = capfd.readouterr().err
        if "the start of MPI" in said:
            break
    assert f"the check hung in the start of MPI: no end in {deadline_s:g} s" in said


def together(link, config=None):
    return self_check._check_together(link, link.rank == 0, MPI, config, lambda stage: None)


def test_a_failure_on_one_rank_is_every_ranks_code(monkeypatch, capsys):
    monkeypatch.setattr(self_check, "_probe_node", lambda *_: [Finding("x", "broken", 70)])
    assert run_loopback(together, 3) == [70, 70, 70]
    assert capsys.readouterr().out.count("FAILED") == 1


def test_a_rank_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(self_check, "_WAIT_S", 0.3)
    start_s = time.monotonic()

    def body(link):
        if link.rank == 2:
            time.sleep(1.0)
        else:
            together(link)

    with pytest.raises(FabricError, match=r"rank [01] .*heard nothing from ranks \[2\]"):
        run_loopback(body, 3)
    assert time.monotonic() - start_s < 30


def test_neighbours_exchange_large_messages_and_all_ranks_talk_to_rank_0(monkeypatch):
    pinged = {}

    def note(link, peers, deadline_s, num_bytes=8):
        pinged[link.rank, num_bytes] = list(peers)

    monkeypatch.setattr(self_check, "ping", note)
    run_loopback(together, 4)
    ring = {0: [1, 3], 1: [0, 2], 2: [1, 3], 3: [0, 2]}
    star = {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}
    assert pinged == {(r, 2**20): p for r, p in ring.items()} | {(r, 8): p for r, p in star.items()}
    assert run_loopback(together, 1) == [0]


def report(host, *findings, cores=(0, 1, 2, 3)):
    return {"host": host, "cores": cores, "findings": [list(finding) for finding in findings]}


def test_what_ranks_agree_on_is_one_line_and_what_they_do_not_is_one_each():
    same = Finding("torch", "2")
    reports = [
        report("a", Finding("Python", "3.11"), same),
        report("b", Finding("Python", "3.10"), same),
        report("b", Finding("Python", "3.10")),
    ]
    assert self_check._merge(reports) == [
        Finding("Python", "a rank 0: 3.11", 71),
        Finding("Python", "b rank 1 and 1 more: 3.10", 71),
        same,
    ]


def test_cores_are_those_of_all_ranks_of_a_node_together():
    one = {"cores": (5,)}
    reports = [report("a"), report("a", cores=[3]), report("b", **one), report("b", **one)]
    reports += [report("c", **one), report("c", cores=[6]), report("c", cores=[7])]
    reports += [report("d", **one), report("d", **one)]
    assert [finding.found for finding in self_check._cores(reports)] == [
        "4 on one node, ranks there: 2",
        "1 on each of 2 nodes, ranks there: 2; ranks share cores",
        "3 on one node, ranks there: 3",
    ]
    assert self_check._cores(reports[:1])[0].found.startswith("4 on this node")


def test_an_environment_that_cannot_be_made_or_stepped_is_a_usage_error():
    def look(name, **options):
        return probe_configured_environment(
            parse_config({"env": {"name": name, "options": options}})
        )

    assert look("synthetic:counting", action_size=2).code == 0
    assert look("synthetic:counting", episode_length=0).code == 2
    broken = look("tests.start.test_self_check:absent")
    assert broken.code == 2
    assert "EnvError" in broken.found


def test_actions_within_bounds_are_tried():
    spec = EnvSpec(
        "x",
        {},
        ActionSpec(
            (ActionPart("discrete", (3, 2)), ActionPart("box", low=(1.0, -2.0), high=(5.0, 2.0)))
        ),
    )
    action = hpcrl.start.probes._some_action(spec)
    np.testing.assert_array_equal(action, np.array([[0, 0, 1, 0]], np.float32))


def test_a_directory_that_cannot_be_written_is_a_usage_error(tmp_path, monkeypatch):
    assert probe_file_system(tmp_path / "not" / "yet").code == 0
    assert list(tmp_path.iterdir()) == []

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hpcrl.start.probes, "write_synced", full)
    finding = probe_file_system(tmp_path / "run")
    assert (finding.code, finding.found) == (2, "can't be written: No space left on device")
    assert str(tmp_path) in finding.subject
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_a_hint_and_no_failure(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    families = probe_environments()
    assert families.code == 0
    assert "atari (not installed: pip install 'ale-py>=0.12.1')" in families.found
    horovod = probe_horovod(None)
    assert (horovod.code, horovod.note) == (0, True)


def test_the_smallest_limit_of_nested_control_groups_counts(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("9:memory:/other\n0::/slurm/job_1/step_0\n")
    step = tmp_path / "root" / "slurm" / "job_1" / "step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    (step.parent / "memory.max").write_text("4096\n")
    (step.parents[1] / "memory.max").write_text("8192\n")
    assert list(_group_limits_bytes(membership, tmp_path / "root")) == [4096, 8192]
    assert list(_group_limits_bytes(tmp_path / "absent")) == []
    assert probe_memory().code == 0
