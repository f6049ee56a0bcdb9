"""The environment families as data: what each is, where it comes from, and an example for tests.

A new family is one module and one entry here. The module has

    make(name, target, num_envs, seeds, options) -> EnvBatch

where `target` is what follows "family:" in the name. One whose environments are single gymnasium
environments has `make_env` instead (see `single`), or both. The module imports the family's
packages only inside its functions, so that all of them can be listed without any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Family:
    """One family of environments.

    Attributes:
      key: what it is listed as; also its name among the extras of setup.py.
      about: what it is, in a few words.
      module: its module in `env_wrappers`.
      prefix: what stands before the colon in names; empty: the key. Families of one prefix share
        a module, and the first of them is the one that is looked up.
      requirements: what pip is told to install; empty where nothing is needed.
      packages: the distributions by which one sees that it is installed.
      example: target of a small environment, for tests; empty where there is none to make.
      example_options: options of the example.
      rows_per_env: consecutive rows of a batch that are one environment.
      limit: the option that cuts episodes off, and its units per agent step.
      threads: the option with the number of threads of a batch, where there is one.
      waiting_threads: threads that each environment has besides, which wait for a process.
      modes: the values of its option `autoreset_mode`, where it has one.
      renders: `make_env` gives frames with render_mode "rgb_array".
      in_default: `make env` installs it.
      conflicts: why its packages can't live beside hpcrl's own; then `make envs` gives it an
        interpreter of its own, for `env.python`. Empty where they can.
      builder: script that builds it from source and installs it into the interpreter given to it,
        from the repository's root; `make envs` runs it instead of pip.
      by_hand: `make envs` leaves it out; the note says what to do.
      note: what else a user must know.
    """

    key: str
    about: str
    module: str
    prefix: str = ""
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    example: str = ""
    example_options: Mapping[str, Any] = field(default_factory=dict)
    rows_per_env: int = 1
    limit: tuple[str, int] = ("", 1)
    threads: str = ""
    waiting_threads: int = 0
    modes: tuple[str, ...] = ()
    renders: bool = False
    in_default: bool = False
    conflicts: str = ""
    builder: str = ""
    by_hand: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """What stands before the colon."""
        return self.prefix or self.key

    @property
    def install_command(self) -> str:
        """The command that installs it; empty where nothing is needed."""
        if self.builder:
            return f"{self.builder} PYTHON"
        quoted = " ".join(f"'{requirement}'" for requirement in self.requirements)
        return f"pip install {quoted}" if quoted else ""

    def versions(self) -> dict[str, str] | None:
        """Versions of its packages; None: one of them is not installed."""
        try:
            return {package: metadata.version(package) for package in self.packages}
        except metadata.PackageNotFoundError:
            return None


_STEPS = ("max_episode_steps", 1)

FAMILIES = (
    Family(
        key="gym",
        about="any environment that is registered with Gymnasium; classic control comes with it",
        module="gymnasium_ids",
        packages=("gymnasium",),
        example="CartPole-v1",
        limit=_STEPS,
        in_default=True,
    ),
    Family(
        key="box2d",
        about="Gymnasium's Box2D physics: LunarLander, BipedalWalker, CarRacing",
        module="gymnasium_ids",
        prefix="gym",
        requirements=("gymnasium[box2d]>=1.1",),
        packages=("box2d",),
        example="LunarLander-v3",
        limit=_STEPS,
        renders=True,
        in_default=True,
    ),
    Family(
        key="mujoco",
        about="Gymnasium's MuJoCo robots: HalfCheetah, Hopper, Ant, Humanoid",
        module="gymnasium_ids",
        prefix="gym",
        requirements=("gymnasium[mujoco]>=1.1",),
        packages=("mujoco",),
        example="HalfCheetah-v5",
        limit=_STEPS,
        in_default=True,
        note="rendering needs MUJOCO_GL=egl and the system's EGL libraries",
    ),
    Family(
        key="atari",
        about="Atari 2600 games on ALE's vector environment; games come with the package",
        module="atari",
        requirements=("ale-py>=0.12.1",),
        packages=("ale-py",),
        example="Breakout",
        limit=("max_frames", 4),
        threads="num_threads",
        in_default=True,
    ),
    Family(
        key="minatar",
        about="five Atari games in miniature: binary planes of 10x10",
        module="minatar",
        requirements=("minatar>=1.0.15",),
        packages=("minatar",),
        example="Breakout",
        limit=_STEPS,
        renders=True,
        in_default=True,
    ),
    Family(
        key="minigrid",
        about="MiniGrid and BabyAI: rooms, doors and keys, seen in part",
        module="minigrid",
        requirements=("minigrid>=3.0",),
        packages=("minigrid",),
        example="MiniGrid-DoorKey-5x5-v0",
        limit=_STEPS,
        renders=True,
        in_default=True,
        note="the text of the mission is not part of the observation",
    ),
    Family(
        key="pettingzoo",
        about="PettingZoo's parallel environments and MPE2: agents of one policy, as rows",
        module="pettingzoo",
        requirements=("pettingzoo>=1.25", "mpe2>=0.1"),
        packages=("pettingzoo", "mpe2"),
        example="simple_spread_v3",
        rows_per_env=3,
        limit=_STEPS,
        in_default=True,
        note="rows of a group must be a multiple of the agents",
    ),
    Family(
        key="envpool",
        about="EnvPool: Atari, MuJoCo, dm_control, Procgen, Football and more, stepped in C++",
        module="envpool",
        requirements=("envpool>=1.2",),
        packages=("envpool",),
        example="Breakout-v5",
        limit=_STEPS,
        threads="num_threads",
        note="about 0.9 GB; Procgen tasks need libqt5core5a and libqt5gui5",
    ),
    Family(
        key="dm_control",
        about="DeepMind's control suite on MuJoCo, through shimmy",
        module="dm_control",
        requirements=("dm-control>=1.0.20", "shimmy>=2", "mujoco<4", "packaging", "imageio"),
        packages=("dm-control", "shimmy"),
        example="cheetah-run",
        limit=_STEPS,
        conflicts="it needs MuJoCo below 4",
        note="rendering needs MUJOCO_GL=egl and the system's EGL libraries",
    ),
    Family(
        key="gymnax",
        about="classic control, bsuite and MinAtar as batches in JAX",
        module="gymnax",
        requirements=("gymnax>=0.0.9", "six"),
        packages=("gymnax",),
        example="CartPole-v1",
        limit=_STEPS,
        note="one compiled call steps the whole batch: give an actor hundreds of environments",
    ),
    Family(
        key="brax",
        about="Brax: rigid bodies as batches in JAX",
        module="brax",
        requirements=("brax>=0.12",),
        packages=("brax",),
        example="inverted_pendulum",
        limit=_STEPS,
        note="compiles for half a minute and more when it is made",
    ),
    Family(
        key="craftax",
        about="Craftax and Craftax-Classic (Crafter) as batches in JAX",
        module="craftax",
        requirements=("craftax>=1.5",),
        packages=("craftax",),
        example="Craftax-Classic-Symbolic-v1",
        limit=_STEPS,
        note="compiles for half a minute and more when it is made",
    ),
    Family(
        key="football",
        about="Google Research Football",
        module="football",
        requirements=("gfootball==2.10.2", "gym==0.25.2", "six"),
        packages=("gfootball",),
        example="academy_empty_goal_close",
        limit=_STEPS,
        builder="slurm/install/build_gfootball.sh",
        note="Python 3.10 or 3.11; its engine compiles for some twelve minutes on 2 cores",
    ),
    Family(
        key="vizdoom",
        about="ViZDoom: first-person shooting, screens and game variables",
        module="vizdoom",
        requirements=("vizdoom>=1.3",),
        packages=("vizdoom",),
        example="VizdoomBasic-v1",
        limit=_STEPS,
        waiting_threads=1,
        renders=True,
    ),
    Family(
        key="nethack",
        about="the NetHack Learning Environment and MiniHack",
        module="nethack",
        requirements=("nle>=1.3", "minihack>=1.0.2"),
        packages=("nle", "minihack"),
        example="NetHackScore-v0",
        limit=_STEPS,
        conflicts="nle needs gymnasium 1.2",
    ),
    Family(
        key="dmlab",
        about="DeepMind Lab, through dmlab-gym",
        module="dmlab",
        requirements=("dmlab-gym>=0.2",),
        packages=("dmlab-gym",),
        conflicts="dmlab-gym needs Python 3.13",
        by_hand=True,
        note="its engine is built by `dmlab-gym build`, with Podman or Docker and the internet",
    ),
    Family(
        key="synthetic",
        about="arithmetic that counts, or asks to remember, for tests and benchmarks",
        module="synthetic",
        example="counting",
        in_default=True,
    ),
    Family(
        key="external",
        about="programs of their own that connect over a Unix socket",
        module="external",
        in_default=True,
    ),
)
"""All of them, in the order in which they are listed."""


def family_named(prefix: str) -> Family | None:
    """The family whose names begin with `prefix` and a colon; None where there is none."""
    return next((family for family in FAMILIES if family.name == prefix), None)
