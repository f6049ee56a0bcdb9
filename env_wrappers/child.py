"""The child process that steps environments for another process; see `isolated`.

It may run under another interpreter, which needs numpy, gymnasium and what the environments
need, but nothing of hpcrl.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import traceback

from env_wrappers import pipe_messages as messages
from env_wrappers.batch import EnvBatch, StepBatch
from env_wrappers.errors import ActionError, EnvError
from env_wrappers.registry import make
from env_wrappers.step_memory import StepMemory, memory_nbytes

_F_SETSIG = 10  # fcntl's number on Linux, named in Python since 3.13


def main(commands: int, answers: int, memory: int, life: int) -> None:
    """Serve commands until the other process says CLOSE or dies.

    Args:
      commands: read end of the pipe of commands.
      answers: write end of the pipe of answers.
      memory: descriptor of the shared memory.
      life: read end of a pipe whose other end only the other process holds.
    """
    for descriptor in (commands, answers, memory, life):
        os.set_inheritable(descriptor, False)
    die_with_parent(life)
    faulthandler.enable()
    server = _Server(answers, memory)
    while True:
        try:
            what, value = messages.receive(commands)
            if what == messages.CLOSE:
                server.close()
                return
            server.serve(what, value)
        except (EOFError, BrokenPipeError):
            # Nobody asks or listens any more. What the environments started must go, too.
            os.killpg(os.getpgrp(), signal.SIGKILL)


def die_with_parent(life: int) -> None:
    """Have the kernel kill this process group when the parent process is gone.

    The kernel raises SIGKILL when the other end of `life` closes, so it works in a process that
    hangs, and takes along what the environments started. A parent-death signal would not: it comes
    when the parent's first thread ends, which may be before the pipe closes, and this process
    would be gone before its group is killed.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(life, fcntl.F_GETFL)
    fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(life, 1)
    except BlockingIOError:
        return
    os.killpg(os.getpgrp(), signal.SIGKILL)  # it was gone before the kernel was asked


class _Server:
    """The environments and their end of the shared memory."""

    def __init__(self, answers: int, memory: int):
        self._answers = answers
        self._memory_fd = memory
        self._envs: EnvBatch | None = None
        self._memory: StepMemory | None = None

    def serve(self, what: bytes, value: dict[str, object] | None) -> None:
        """Carry out one command and answer it."""
        try:
            answer = self._make(value) if what == messages.MAKE else self._step(what)
        except ActionError as error:
            self._fail("action", str(error))
        except EnvError as error:
            self._fail("garbage", str(error))
        except Exception as error:
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}:{last.lineno}, in {last.name}"
            self._fail("raised", f"{type(error).__name__}: {error} ({place})")
        else:
            messages.send(self._answers, *answer)

    def close(self) -> None:
        """Close the environments."""
        if self._envs is not None:
            self._envs.close()

    def _fail(self, kind: str, message: str) -> None:
        messages.send(self._answers, messages.FAILED, {"kind": kind, "message": message})

    def _make(self, value: dict[str, object] | None) -> tuple[bytes, dict[str, object] | None]:
        arguments: dict[str, object] = value or {}
        envs = make(**arguments)  # type: ignore[arg-type]
        nbytes = memory_nbytes(envs.spec, envs.num_envs)
        os.ftruncate(self._memory_fd, nbytes)
        buffer = mmap.mmap(self._memory_fd, nbytes)
        self._memory = StepMemory(buffer, envs.spec, envs.num_envs)
        self._envs = envs
        return messages.SPEC, envs.spec

    def _step(self, what: bytes) -> tuple[bytes, None]:
        assert self._envs is not None
        assert self._memory is not None
        step: StepBatch
        if what == messages.RESET:
            step = self._envs.reset()
        else:
            step = self._envs.step(self._memory.action.copy())
        self._envs.check(step)
        self._memory.write(step)
        return messages.DONE, None
