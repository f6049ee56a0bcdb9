"""The commit that is told is the one that runs, and a guess is never told."""

import os
import subprocess

import pytest

import hpcrl
from hpcrl import code_version

COMMITTER = {
    **{f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": "/nobody/has/this/file",
}


def git(folder, *arguments):
    environment = {**os.environ, **COMMITTER}
    command = ["git", "-C", folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a folder, which is where the code is found."""
    folder = tmp_path / "clone" / "hpcrl"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(code_version, "_PACKAGE", folder)
    return folder


def found():
    return code_version.code_version.__wrapped__()


def commit(clone, *paths):
    git(clone, "init", "-q")
    git(clone, "add", "-f", *paths)
    git(clone, "commit", "-q", "-m", "text")
    return git(clone, "rev-parse", "HEAD")


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(package):
    head = commit(package.parent, "hpcrl")
    (package.parent / "notes.txt").write_text("untracked")
    assert found() == f"{hpcrl.__version__}+g{head[:12]}"
    (package / "__init__.py").write_text("changed")
    assert found() == f"{hpcrl.__version__}+g{head[:12]}.dirty"


def test_another_repository_is_not_taken_for_that_of_the_code(package, tmp_path, monkeypatch):
    assert found() == hpcrl.__version__  # no repository at all
    (package.parent / "project.py").write_text("")
    commit(package.parent, "project.py")  # the package lies in it and is no part of it
    assert found() == hpcrl.__version__
    other = tmp_path / "other" / "hpcrl"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    commit(other.parent, "hpcrl")
    monkeypatch.setenv("GIT_DIR", str(other.parent / ".git"))
    assert found() == hpcrl.__version__


def test_without_git_the_version_is_told(package, tmp_path, monkeypatch):
    commit(package.parent, "hpcrl")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found() == hpcrl.__version__


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_checkout_of_another_user_tells_its_commit(package):
    head = commit(package.parent, "hpcrl")
    for folder, folders, files in os.walk(package.parent):
        for name in [".", *folders, *files]:
            os.chown(os.path.join(folder, name), 12345, 12345)
    assert found() == f"{hpcrl.__version__}+g{head[:12]}"
