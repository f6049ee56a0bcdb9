"""`python -m env_wrappers.install CONSTRAINTS FOLDER [KEY...]`: install environment families.

Those whose packages can live beside hpcrl's go into this interpreter, each of the others into
one of its own, `FOLDER/KEY/bin/python`, for `env.python`. What fails is told at the end, and the
exit code is then 1.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from env_wrappers.families import FAMILIES, Family

_EVERYWHERE = ("numpy", "gymnasium")
"""What stepping needs in any interpreter."""


def install(family: Family, constraints: Path, folder: Path) -> str:
    """Install one family; return where, or raise `subprocess.CalledProcessError` or OSError."""
    if family.builder:
        subprocess.run([family.builder, sys.executable], check=True)
        return "beside hpcrl"
    if not family.conflicts:
        _pip(Path(sys.executable), "-c", str(constraints), *family.requirements)
        return "beside hpcrl"
    python = folder / family.key / "bin" / "python"
    if not python.exists():
        venv.create(folder / family.key, with_pip=True, symlinks=True)
    _pip(python, *_EVERYWHERE, *family.requirements)
    return str(python)


def main(arguments: list[str]) -> int:
    """Install the families named, or all that aren't there yet."""
    constraints, folder, *keys = arguments
    unknown = set(keys) - {family.key for family in FAMILIES}
    if unknown:
        print(f"no such families: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = []
    for family in FAMILIES:
        if not family.requirements or (keys and family.key not in keys):
            continue
        if family.by_hand:
            print(f"{family.key}: by hand: {family.note}", flush=True)
            continue
        if not keys and family.versions() is not None:
            continue
        print(f"{family.key}: {' '.join(family.requirements)}", flush=True)
        try:
            where = install(family, Path(constraints), Path(folder).absolute())
            print(f"{family.key}: installed, {where}", flush=True)
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(family.key)
            print(f"{family.key}: {error}", file=sys.stderr, flush=True)
    if failed:
        print(f"not installed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _pip(python: Path, *arguments: str) -> None:
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q")
    subprocess.run([*pip, *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
