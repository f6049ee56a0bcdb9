"""What `make envs` asks pip to do; pip itself is noted instead of run."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from env_wrappers import install
from env_wrappers.families import Family

BESIDE = Family("near", "", "near", requirements=("near>=1",), packages=("surely-not-there",))
APART = dataclasses.replace(BESIDE, key="far", requirements=("far<2",), conflicts="of its own")
THERE = dataclasses.replace(BESIDE, key="there", packages=("numpy",))
BUILT_IN = Family("plain", "", "plain")


@pytest.fixture
def told(monkeypatch):
    """The families above, and the commands that would be run; those with "bad" in them fail."""
    commands: list[list[str]] = []

    def run(command, check):
        assert check
        commands.append([str(word) for word in command])
        if any("bad" in str(word) for word in command):
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(install, "FAMILIES", (BESIDE, APART, THERE, BUILT_IN))
    monkeypatch.setattr("env_wrappers.install.subprocess.run", run)
    monkeypatch.setattr("env_wrappers.install.venv.create", lambda folder, **_: folder.mkdir())
    return commands


def test_what_is_missing_is_installed_beside_hpcrl_or_in_its_own_interpreter(told, tmp_path):
    assert install.main(["pins.txt", str(tmp_path)]) == 0
    (near, far) = told
    assert near[0] == sys.executable
    assert near[-3:] == ["-c", "pins.txt", "near>=1"]
    assert far[0] == str(Path(tmp_path) / "far" / "bin" / "python")
    assert far[-3:] == ["numpy", "gymnasium", "far<2"]


def test_families_that_are_named_are_installed_even_if_they_are_there(told, tmp_path):
    assert install.main(["pins.txt", str(tmp_path), "there"]) == 0
    assert [command[-1] for command in told] == ["near>=1"]


def test_failures_are_told_and_the_others_installed(told, tmp_path, monkeypatch, capsys):
    bad = dataclasses.replace(BESIDE, key="worse", requirements=("bad",))
    monkeypatch.setattr(install, "FAMILIES", (bad, BESIDE))
    assert install.main(["pins.txt", str(tmp_path)]) == 1
    assert [command[-1] for command in told] == ["bad", "near>=1"]
    assert "not installed: worse" in capsys.readouterr().err


def test_an_unknown_family_is_refused(told, tmp_path, capsys):
    assert install.main(["pins.txt", str(tmp_path), "nowhere"]) == 2
    assert "no such families: nowhere" in capsys.readouterr().err
    assert not told
