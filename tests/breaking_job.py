"""`hpcrl train` in which an exception is raised on purpose, in one rank and at a chosen time.

    python -m tests.breaking_job train CONFIG [--section.key VALUE ...]

BREAK_AT says where, such as "actor/start-up" or "learner/shut-down": in the role's first rank.
SIGRTMIN+1 breaks any rank in the middle of whatever it does. The time is told on stderr.
"""

import os
import re
import signal
import sys
import time
from functools import partial

from hpcrl.cli import run
from hpcrl.node.slurm_env import is_launched
from hpcrl.start import launch, local_launch, preparing

BREAK = signal.SIGRTMIN + 1
PROGRAM = ("-m", "tests.breaking_job")
WORDS = "broken on purpose"


def break_down(*_):
    print(f"\n{WORDS} at {time.time():.3f}", file=sys.stderr, flush=True)
    raise RuntimeError(WORDS)


def broken_at(output):
    """When it broke, in Unix seconds."""
    return float(re.search(rf"{WORDS} at ([\d.]+)", output)[1])


def install(role, phase):
    places = {"start-up": (launch, "prepare"), "shut-down": (preparing, "leave")}
    if phase not in places:
        return
    module, name = places[phase]
    healthy = getattr(module, name)

    def breaking(first, *rest):
        seat = getattr(first, "seat", first)
        if seat.rank == seat.topology.ranks_of(role)[0]:
            break_down()
        return healthy(first, *rest)

    setattr(module, name, breaking)


if __name__ == "__main__":
    if is_launched():
        signal.signal(BREAK, break_down)
        role, _, phase = os.environ.get("BREAK_AT", "").partition("/")
        install(role, phase)
    else:
        local_launch.mpirun_command = partial(local_launch.mpirun_command, program=PROGRAM)
    run(sys.argv[1:])
