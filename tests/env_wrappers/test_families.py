"""The families as data: setup.py and the Makefile agree with them; a missing one says so."""

import os
import re
import runpy
from importlib import metadata
from pathlib import Path

import pytest
import setuptools

import env_wrappers
from env_wrappers import EnvError
from env_wrappers.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


def test_extras_of_setup_py_are_the_requirements_of_the_families(monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    extras = runpy.run_path(str(ROOT / "setup.py"))["EXTRAS"]
    for family in FAMILIES:
        assert extras.get(family.key, []) == list(family.requirements), family.key


def test_make_env_installs_the_default_families():
    line = re.search(r"^FAMILIES := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = {family.key for family in FAMILIES if family.in_default and family.requirements}
    assert set(line[1].split(",")) == wanted


def test_keys_are_unique_and_modules_exist():
    keys = [family.key for family in FAMILIES]
    assert len(set(keys)) == len(keys)
    for family in FAMILIES:
        assert (ROOT / "env_wrappers" / f"{family.module}.py").exists()
        assert bool(family.packages) >= bool(family.requirements)


@pytest.mark.parametrize("prefix", sorted({f.name for f in FAMILIES if f.requirements} - {"gym"}))
def test_a_missing_package_is_told_with_the_command_that_installs_it(prefix, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    family = next(family for family in FAMILIES if family.name == prefix)
    with pytest.raises(EnvError, match="not installed here: ") as error:
        env_wrappers.make(f"{prefix}:{family.example or 'any'}", 1, [0])
    command = f"pip install '{family.requirements[0]}'" if not family.builder else family.builder
    assert f"not installed here: {command}" in str(error.value)
    assert ("env.python" in str(error.value)) == bool(family.conflicts)


def test_builders_are_scripts_that_can_be_run():
    for family in FAMILIES:
        assert not family.builder or os.access(ROOT / family.builder, os.X_OK), family.key


def test_wrong_kwargs_are_told():
    for name in ("minigrid:MiniGrid-Empty-5x5-v0", "gym:CartPole-v1"):
        with pytest.raises(EnvError, match=r"doesn't take all of the kwargs \{'no_such': 1\}"):
            env_wrappers.make(name, 1, [0], {"kwargs": {"no_such": 1}})
