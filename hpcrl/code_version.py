"""Which code runs: the version, and the commit where it is run from a checkout."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import hpcrl

_PACKAGE = Path(hpcrl.__file__).resolve().parent
_TIMEOUT_S = 10.0


@cache
def code_version() -> str:
    """Return such as "0.1.0+g821431f0c2ab", with ".dirty" where tracked files were changed.

    Only the version where there is no git, or the package is no part of what a repository holds,
    such as one installed into an environment that lies in somebody's checkout.

    Hazard: it starts git twice, which reads the status of every tracked file. One rank of a job
    calls it and tells the others.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        commit = _git("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=.dirty")
    except (OSError, subprocess.SubprocessError):
        return hpcrl.__version__
    return f"{hpcrl.__version__}+g{commit}"


def _git(*arguments: str) -> str:
    # Other users' checkouts count, too; what lies in them is being run anyway.
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        command,
        cwd=_PACKAGE,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    return done.stdout.strip()
