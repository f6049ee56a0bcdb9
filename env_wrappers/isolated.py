"""Environments in a child process, which is started again when they fail.

What an environment does wrong ends at most the child: an exception, what can't be a step, no
answer in time, a crash of the process. All environments of the child are then made anew with
seeds that were never used before, and their rows are marked `restarted`, so that nothing is
learned from the steps that the failure cut off.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env_wrappers import pipe_messages as messages
from env_wrappers.batch import FAILURE_KINDS, EnvBatch, StepBatch
from env_wrappers.child_process import ChildDied, ChildProcess
from env_wrappers.errors import ActionError, EnvError, EnvFailure
from env_wrappers.step_memory import StepMemory, memory_nbytes

_HOUR_S = 3600.0
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Isolation:
    """How a child process is started and watched.

    Attributes:
      python: path of its interpreter; empty: this process's own.
      step_timeout_s: longest time for a step or a reset of the batch.
      start_timeout_s: longest time to import and make the environments.
      max_restarts_per_hour: failures within an hour beyond which there is no other start.
    """

    python: str = ""
    step_timeout_s: float = 60.0
    start_timeout_s: float = 120.0
    max_restarts_per_hour: int = 60


@dataclass(frozen=True)
class _Failure:
    kind: str
    message: str


class IsolatedBatch(EnvBatch):
    """Environments that a child process steps; see the module."""

    def __init__(
        self,
        name: str,
        num_envs: int,
        seeds: Sequence[int],
        options: Mapping[str, Any],
        isolation: Isolation,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the child and make the environments; as `make`.

        Args:
          name: as `make`.
          num_envs: E.
          seeds: of the first start; those of later ones derive from them.
          options: as `make`; JSON-able.
          isolation: how.
          clock: seconds, for the restarts of the last hour.

        Raises:
          EnvError: as `make`; or no interpreter, a package missing there, a child that ends or
            is too slow.
        """
        self.num_envs = num_envs
        self._name = name
        self._seeds = list(seeds)
        self._options = dict(options)
        self._isolation = isolation
        self._clock = clock
        self._failures = dict.fromkeys(FAILURE_KINDS, 0)
        self._times: deque[float] = deque()
        self._child: ChildProcess | None = None
        failure = self._start()
        if failure is not None:
            self._end()
            raise EnvError(_startup_message(name, failure, isolation))

    @property
    def failures(self) -> dict[str, int]:
        """Failures so far, each of which made all of these environments anew, by kind."""
        return dict(self._failures)

    def reset(self) -> StepBatch:
        """Start an episode everywhere; only the first call of each child uses seeds."""
        failure = self._command(messages.RESET)
        return self._memory.read() if failure is None else self._recover(failure)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`.

        Raises:
          ActionError: the actions are none.
          EnvFailure: the environments failed too often.
        """
        action = self._memory.action
        if actions.shape != action.shape:
            raise ActionError(f"actions: expected shape {action.shape}, got {actions.shape}")
        action[:] = actions
        failure = self._command(messages.STEP)
        return self._memory.read() if failure is None else self._recover(failure)

    def close(self) -> None:
        """Close the environments and end the child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _start(self) -> _Failure | None:
        """Start a child that makes the environments."""
        foreign = bool(self._isolation.python)
        python = self._isolation.python or sys.executable
        try:
            self._child = ChildProcess(python, foreign)
        except OSError as error:
            return _Failure("died", f"env.python: {python} can't be started: {error.strerror}")
        request = {
            "name": self._name,
            "num_envs": self.num_envs,
            "seeds": self._new_seeds(),
            "options": self._options,
        }
        answer = self._ask(messages.MAKE, request, self._isolation.start_timeout_s)
        if isinstance(answer, _Failure):
            return answer
        old = getattr(self, "spec", answer)
        if answer != old:
            return _Failure("garbage", "its spaces are others than before")
        self.spec = answer
        nbytes = memory_nbytes(answer, self.num_envs)
        try:
            buffer = mmap.mmap(self._child.memory, nbytes)
        except OSError as error:
            return _Failure("died", f"can't share {nbytes} bytes with it: {error.strerror}")
        self._memory = StepMemory(buffer, answer, self.num_envs)
        return None

    def _new_seeds(self) -> list[int]:
        """The seeds given, then others for every start, so that no episode is played again."""
        start = sum(self._failures.values())
        if start == 0:
            return self._seeds
        states = [np.random.SeedSequence([seed, start]).generate_state(1) for seed in self._seeds]
        return [int(state[0] >> 1) for state in states]

    def _command(self, what: bytes) -> _Failure | None:
        answer = self._ask(what, None, self._isolation.step_timeout_s)
        return answer if isinstance(answer, _Failure) else None

    def _ask(self, what: bytes, value: Any, timeout_s: float) -> Any:
        """Give a command; return the value of the answer, or how it failed."""
        assert self._child is not None, "the environments are closed"
        try:
            self._child.send(what, value)
            kind, answer = self._child.answer(timeout_s)
        except ChildDied as error:
            return _Failure("died", str(error))
        except TimeoutError:
            return _Failure("hung", f"no answer for {timeout_s:g} s")
        if kind != messages.FAILED:
            return answer
        if answer["kind"] == "action":
            raise ActionError(answer["message"])
        return _Failure(answer["kind"], answer["message"])

    def _recover(self, failure: _Failure) -> StepBatch:
        """End the child, and start others until one gives first observations."""
        found: _Failure | None = failure
        while found is not None:
            self._end()
            self._count(found)
            found = self._start() or self._command(messages.RESET)
            if self._child is None:  # the node has no process, memory or descriptor to spare
                time.sleep(_PAUSE_S)
        first = self._memory.read()
        return first._replace(restarted=np.ones(self.num_envs, np.bool_))

    def _count(self, failure: _Failure) -> None:
        """Note a failure; raise EnvFailure where it is one too many."""
        now_s = self._clock()
        self._failures[failure.kind] += 1
        self._times.append(now_s)
        while self._times[0] <= now_s - _HOUR_S:
            self._times.popleft()
        limit = self._isolation.max_restarts_per_hour
        print(
            f"hpcrl: {self._name}: failure {sum(self._failures.values())}, {failure.kind}: "
            f"{failure.message}; {self.num_envs} environments are made anew",
            file=sys.stderr,
            flush=True,
        )
        if len(self._times) > limit:
            kinds = ", ".join(f"{n} {kind}" for kind, n in self._failures.items() if n)
            raise EnvFailure(
                f"{self._name}: its environments failed {len(self._times)} times within an hour, "
                f"and env.max_restarts_per_hour is {limit} (of one child process; {kinds} since "
                f"the start); the last one {failure.kind}: {failure.message}"
            )

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _startup_message(name: str, failure: _Failure, isolation: Isolation) -> str:
    if failure.kind == "garbage":  # its own words are those of `make`
        return failure.message
    where = f" under {isolation.python}" if isolation.python else ""
    hint = "; env.start_timeout_s is the limit" if failure.kind == "hung" else ""
    return f"{name} can't be made in a child process{where}: {failure.message}{hint}"
