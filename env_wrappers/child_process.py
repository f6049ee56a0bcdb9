"""Starts, asks and ends the child process that steps environments."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from env_wrappers import pipe_messages as messages

_CLOSE_S = 5.0
_LOOK_S = 0.5

# With any of these a library in the child might take it for a rank of the job.
_LAUNCHER_PREFIXES = (
    *("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX", "PMI_", "PMI2_", "MPI", "HYDRA_", "HYDI_"),
    *("I_MPI_", "MV2_", "SLURM_", "SLURMD_", "PALS_", "ALPS_", "FLUX_", "LSB_", "JSM_", "PBS_"),
    "HPCRL_",
)

# Plain enough for any Python: an old one has to say so itself. The package is loaded from its
# folder, so that the rest of what is installed beside it doesn't come before the child's own.
_PROGRAM = """\
import os, sys
sys.path[:] = [place for place in sys.path if place]
descriptors, folder = [int(word) for word in sys.argv[1:5]], sys.argv[5]
def refuse(why):
    import json, struct
    text = json.dumps({"kind": "garbage", "message": why}).encode()
    os.write(descriptors[1], struct.pack("<cI", b"F", len(text)) + text)
    sys.exit(1)
if sys.version_info < (3, 10):
    refuse(sys.executable + " is Python " + sys.version.split()[0] + ", it must be 3.10 or newer; "
           "an older one can run an external simulator (docs/external-simulators.md)")
import importlib.util
place = os.path.join(folder, "__init__.py")
spec = importlib.util.spec_from_file_location(
    "env_wrappers", place, submodule_search_locations=[folder])
sys.modules["env_wrappers"] = package = importlib.util.module_from_spec(spec)
try:
    spec.loader.exec_module(package)
    from env_wrappers.child import main
except ImportError as error:
    refuse("%s can't step environments: %s; install numpy and gymnasium there"
           % (sys.executable, error))
sys.argv[1:] = []
main(*descriptors)
"""


def child_environment(environ: Mapping[str, str], foreign: bool) -> dict[str, str]:
    """The variables for a child: without those by which launchers tell a process its rank.

    Args:
      environ: of this process.
      foreign: the child runs under another interpreter, which finds its own home.
    """
    kept = {
        k: v for k, v in environ.items() if not k.startswith(_LAUNCHER_PREFIXES) or k == "HPCRL_GPU"
    }
    if foreign:
        kept.pop("PYTHONHOME", None)
    return kept


class ChildDied(Exception):
    """The child process is gone; the message says how it ended."""


class ChildProcess:
    """One child process, in a process group of its own, and this side of its pipes.

    Starting it doesn't wait for it. The process group ends with this process, whatever ends it.

    Args:
      python: path of its interpreter.
      foreign: it isn't this process's own.

    Attributes:
      memory: descriptor of memory that both share; the child sets its size.
      pid: of the process, and of its group.

    Raises:
      OSError: it can't be started.
    """

    def __init__(self, python: str, foreign: bool):
        opened: list[int] = []
        try:
            opened.append(os.memfd_create("hpcrl-environments", os.MFD_CLOEXEC))
            for _ in range(3):
                opened += os.pipe()
            self.memory, *pipes = opened
            their_commands, self._commands, self._answers, their_answers, their_life, self._life = (
                pipes
            )
            theirs = (their_commands, their_answers, self.memory, their_life)
            package = str(Path(__file__).resolve().parent)
            self._process = subprocess.Popen(
                [python, "-u", "-c", _PROGRAM, *map(str, theirs), package],
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
                env=child_environment(os.environ, foreign),
            )
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        for descriptor in (their_commands, their_answers, their_life):
            os.close(descriptor)
        self.pid = self._process.pid
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)

    def send(self, what: bytes, value: Any = None) -> None:
        """Send a command.

        Raises:
          ChildDied: nobody reads it.
        """
        try:
            messages.send(self._commands, what, value)
        except OSError:
            raise ChildDied(self._ending()) from None

    def answer(self, timeout_s: float) -> tuple[bytes, Any]:
        """Wait for the answer.

        Raises:
          TimeoutError: none came.
          ChildDied: none will come.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            if self._poll.poll(1e3 * max(0.0, min(_LOOK_S, left_s))):
                break
            # What the environments started may hold the pipe of a process that is gone.
            if self._is_gone():
                raise ChildDied(self._ending())
            if left_s <= 0:
                raise TimeoutError
        try:
            return messages.receive(self._answers)
        except EOFError:
            raise ChildDied(self._ending()) from None
        except ValueError as error:
            raise ChildDied(f"its answer can't be read: {error}") from None

    def _is_gone(self) -> bool:
        """Whether it ended; it isn't reaped, so that no other process can get its number."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def _ending(self) -> str:
        """How it ended; one that has closed its pipes, but lives on, is killed."""
        end_s = time.monotonic() + _LOOK_S
        while not self._is_gone() and time.monotonic() < end_s:
            time.sleep(0.005)
        lives = not self._is_gone()
        self.kill()
        code = self._process.returncode
        if lives:
            return "its process closed its pipes"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process left with exit code {code}"

    def close(self) -> None:
        """Let it close its environments and leave; end it if it doesn't."""
        with contextlib.suppress(ChildDied):
            self.send(messages.CLOSE)
            end_s = time.monotonic() + _CLOSE_S
            while not self._is_gone() and time.monotonic() < end_s:
                time.sleep(0.002)
        self.kill()

    def kill(self) -> None:
        """End its whole process group now, and reap it; does nothing the second time."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._commands, self._answers, self._life, self.memory):
            os.close(descriptor)
