"""Environments that are programs of their own and connect over a Unix socket.

`external:LABEL`, where the label is for messages only. The batch listens on a socket file in a
folder that only the user can enter, starts one program for each environment (or waits for such
as were started otherwise), and steps all of them at once. The protocol is described in
docs/external-simulators.md; `simulator_client` is its reference client.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env_wrappers import simulator_client as protocol
from env_wrappers.actions import ActionCodec
from env_wrappers.batch import (
    Arrays,
    EnvBatch,
    EpisodeTotals,
    StepBatch,
    as_rewards,
    env_spec,
    reset_batch,
)
from env_wrappers.errors import EnvError
from env_wrappers.observations import ObservationCodec
from env_wrappers.options import check_range, resolve_options

# command: program and arguments of one simulator, started once for each environment with the
#   variables HPCRL_SIMULATOR_SOCKET and HPCRL_SIMULATOR_TOKEN_FILE; "{python}" stands for this
#   interpreter. Empty: simulators are started by someone else, who looks for sockets in
#   `socket_dir`.
# socket_dir: folder for the socket files; empty: a temporary one.
# token_file: holds the secret that simulators must show; empty: one is made in the folder.
# connect_timeout_s: longest wait for all simulators.
# step_timeout_s: longest wait for the answer to a step or a reset.
# max_episode_steps: agent steps after which an episode is truncated; 0: simulators see to it.
# frame_stack: time steps that the network sees stacked.
DEFAULTS: dict[str, Any] = {
    "command": (),
    "socket_dir": "",
    "token_file": "",
    "connect_timeout_s": 60.0,
    "step_timeout_s": 60.0,
    "max_episode_steps": 0,
    "frame_stack": 1,
}

_HELLO_S = 5.0
_HELLO_FIXED = len(protocol.MAGIC) + 4 + protocol.TOKEN_BYTES
_DTYPES = ("float32", "float64", "int32", "uint8")


class ExternalBatch(EnvBatch):
    """E connected simulators."""

    def __init__(self, name: str, seeds: Sequence[int], options: Mapping[str, Any]) -> None:
        """Listen, start the programs, and wait until all have connected.

        Args:
          name: full name for the spec and for messages.
          seeds: one for each simulator.
          options: all of `DEFAULTS`, checked.

        Raises:
          EnvError: not all of them came, or their spaces differ or can't travel.
        """
        self.num_envs = len(seeds)
        self._name = name
        self._timeout_s = options["step_timeout_s"]
        self._max_steps = options["max_episode_steps"]
        self._seeds = [seed + 1 for seed in seeds]  # 0 means to go on
        self._programs: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._pids: list[int] = []
        try:
            hello = self._meet(options)
            observation = _space(hello, "observation")
            self._observations = ObservationCodec(observation)
            self._dtype, self._shape = np.dtype(observation.dtype), observation.shape or ()
            self._actions = ActionCodec(_space(hello, "action"), self.num_envs)
        except BaseException:
            self.close()
            raise
        stacked = self._observations.spec(options["frame_stack"])
        self.spec = env_spec(name, stacked, self._actions.spec())
        self._totals = EpisodeTotals(self.num_envs)

    def reset(self) -> StepBatch:
        """Start an episode everywhere; only the first call uses the seeds."""
        observation = self._observations.new_arrays(self.num_envs)
        self._restart(range(self.num_envs), observation)
        self._seeds = [0] * self.num_envs
        self._totals.clear()
        return reset_batch(observation, self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere at once; see `EnvBatch.step`."""
        self._actions.decode(actions)
        for row in range(self.num_envs):
            self._send(row, protocol.STEP, actions[row].tobytes())
        observation = self._observations.new_arrays(self.num_envs)
        rewards = np.zeros(self.num_envs, np.float32)
        flags = np.zeros((2, self.num_envs), np.bool_)
        terminated, truncated = flags
        for row in range(self.num_envs):
            rewards[row], terminated[row], truncated[row] = self._state(row, observation)
        if self._max_steps:
            truncated |= self._totals.steps + 1 >= self._max_steps
        truncated &= ~terminated
        ended = terminated | truncated
        final: Arrays | None = None
        if truncated.any():
            final = {path: leaf.copy() for path, leaf in observation.items()}
        self._restart(np.flatnonzero(ended).tolist(), observation)
        reward = as_rewards(self._name, rewards, self.num_envs)
        episode_return, episode_steps = self._totals.add(reward, ended)
        return StepBatch(
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(self.num_envs, np.bool_),
            restarted=np.zeros(self.num_envs, np.bool_),
            final_observation=final,
            ended=ended,
            episode_return=episode_return,
            episode_steps=episode_steps,
        )

    def check(self, step: StepBatch) -> None:
        """Raise EnvError unless all observations are in their space."""
        self._observations.check_bounds(step.observation)

    def close(self) -> None:
        """Say CLOSE, and end programs that don't leave."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                protocol.send_message(connection, protocol.CLOSE)
            connection.close()
        self._connections.clear()
        end_s = time.monotonic() + 2.0
        for program in self._programs:
            try:
                program.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        self._programs.clear()

    def _restart(self, rows: Sequence[int], observation: Arrays) -> None:
        for row in rows:
            self._send(row, protocol.RESET, protocol.RESET_BODY.pack(self._seeds[row]))
        for row in rows:
            self._state(row, observation)
        if rows:
            chosen = {path: leaf[list(rows)] for path, leaf in observation.items()}
            self._observations.check_bounds(chosen)

    def _send(self, row: int, kind: int, body: bytes) -> None:
        try:
            protocol.send_message(self._connections[row], kind, body)
        except OSError as error:
            raise self._broken(row, f"takes no message ({error})") from None

    def _state(self, row: int, observation: Arrays) -> tuple[float, bool, bool]:
        """Wait for a simulator's STATE and write its observation."""
        try:
            kind, body = protocol.receive_message(self._connections[row])
        except protocol.ProtocolError as error:
            raise self._broken(row, str(error)) from None
        head = protocol.STATE_HEAD.size
        expected = head + self._dtype.itemsize * int(np.prod(self._shape))
        if kind != protocol.STATE or len(body) != expected:
            raise self._broken(
                row, f"sent message {kind} of {len(body)} bytes, expected a state of {expected}"
            )
        reward, terminated, truncated, _ = protocol.STATE_HEAD.unpack_from(body)
        little = np.frombuffer(body, self._dtype.newbyteorder("<"), offset=head)
        array = little.astype(self._dtype).reshape(self._shape)
        self._observations.write_row(observation, row, array)
        return reward, bool(terminated), bool(truncated)

    def _broken(self, row: int, what: str) -> EnvError:
        # Programs connect in any order; one behind a shell is none of those started here.
        found = [program for program in self._programs if program.pid == self._pids[row]]
        for program in found:
            with contextlib.suppress(subprocess.TimeoutExpired):
                what += f", exit code {program.wait(0.2)}"
        return EnvError(f"{self._name}: simulator {row}: {what}")

    def _meet(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Listen until every simulator has said who it is; return the spaces."""
        base = options["socket_dir"]
        if base:
            Path(base).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="hpcrl-")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = str(Path(base or folder) / f"{os.getpid()}-{secrets.token_hex(4)}.sock")
        try:
            token_file = options["token_file"] or _new_token(base or folder)
            token = _read_token(token_file)
            listener.bind(path)
            listener.listen(self.num_envs)
            self._start_programs(options["command"], path, token_file)
            return self._accept_all(listener, path, token, options["connect_timeout_s"])
        except OSError as error:
            raise EnvError(f"{self._name}: {path}: {error}") from None
        finally:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            shutil.rmtree(folder, ignore_errors=True)

    def _start_programs(self, command: Sequence[str], path: str, token_file: str) -> None:
        if not command:
            return
        words = [sys.executable if word == "{python}" else str(word) for word in command]
        variables = {protocol.SOCKET_VARIABLE: path, protocol.TOKEN_VARIABLE: token_file}
        for _ in range(self.num_envs):
            try:
                program = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
                )
            except OSError as error:
                raise EnvError(
                    f"{self._name}: {words[0]} can't be started: {error.strerror}"
                ) from None
            self._programs.append(program)

    def _accept_all(
        self, listener: socket.socket, path: str, token: bytes, timeout_s: float
    ) -> dict[str, Any]:
        end_s = time.monotonic() + timeout_s
        refused: list[str] = []
        first: dict[str, Any] = {}
        listener.settimeout(0.2)
        while len(self._connections) < self.num_envs:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check_patience(path, time.monotonic() > end_s, timeout_s, refused)
                continue
            connection.settimeout(_HELLO_S)
            try:
                hello = _read_hello(connection, token)
                if first and hello != first:
                    raise protocol.ProtocolError("its spaces are others than the first one's")
                index = len(self._connections)
                body = protocol.WELCOME_BODY.pack(protocol.VERSION, index, self._seeds[index])
                protocol.send_message(connection, protocol.WELCOME, body)
            except (protocol.ProtocolError, OSError) as error:
                refused.append(str(error))
                with contextlib.suppress(OSError):
                    protocol.send_message(connection, protocol.ERROR, str(error).encode())
                connection.close()
                continue
            connection.settimeout(self._timeout_s)
            first = hello
            self._connections.append(connection)
            self._pids.append(_peer_pid(connection))
        return first

    def _check_patience(
        self, path: str, is_late: bool, timeout_s: float, refused: Sequence[str]
    ) -> None:
        """Raise EnvError when those that are missing won't come."""
        codes = [program.poll() for program in self._programs]
        gone = [code for code in codes if code is not None]
        came = len(self._connections)
        if not is_late and not gone:
            return
        why = f"; refused: {'; '.join(dict.fromkeys(refused))}" if refused else ""
        if gone:
            why += f"; {len(gone)} programs ended, exit codes {sorted(set(gone))}"
        waited = f" within {timeout_s:g} s" if is_late else ""
        raise EnvError(
            f"{self._name}: {came} of {self.num_envs} simulators connected to {path}{waited}{why}"
        )


def _peer_pid(connection: socket.socket) -> int:
    """The process at the other end."""
    credentials = struct.Struct("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(data)[0])


def _new_token(folder: str) -> str:
    """Make a token file that only the user can read."""
    path = Path(folder) / "token"
    with contextlib.suppress(FileExistsError):  # of another batch with this folder
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, secrets.token_hex(protocol.TOKEN_BYTES // 2).encode())
        os.close(descriptor)
    return str(path)


def _read_token(path: str) -> bytes:
    mode = os.stat(path).st_mode
    if mode & 0o077:
        raise EnvError(
            f"token file {path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}"
        )
    token = Path(path).read_bytes().strip()
    if not 16 <= len(token) <= protocol.TOKEN_BYTES:
        raise EnvError(
            f"token file {path} holds {len(token)} bytes, expected 16 to {protocol.TOKEN_BYTES}"
        )
    return token


def _read_hello(connection: socket.socket, token: bytes) -> dict[str, Any]:
    """Return the spaces that a simulator tells; raise ProtocolError for one that may not come."""
    kind, body = protocol.receive_message(connection)
    if kind != protocol.HELLO or not body.startswith(protocol.MAGIC):
        raise protocol.ProtocolError("its first message is no hello")
    if len(body) < _HELLO_FIXED:
        raise protocol.ProtocolError(f"its hello has {len(body)} bytes, too few")
    (version,) = struct.unpack_from("<I", body, len(protocol.MAGIC))
    if version != protocol.VERSION:
        raise protocol.ProtocolError(
            f"it speaks version {version} of the protocol, hpcrl version {protocol.VERSION}"
        )
    shown = body[_HELLO_FIXED - protocol.TOKEN_BYTES : _HELLO_FIXED].rstrip(b"\0")
    if not hmac.compare_digest(shown, token):
        raise protocol.ProtocolError("wrong token")
    try:
        hello = json.loads(body[_HELLO_FIXED:])
    except ValueError as error:
        raise protocol.ProtocolError(f"its spaces are no JSON: {error}") from None
    if not isinstance(hello, dict):
        raise protocol.ProtocolError("its spaces are no JSON object")
    return hello


def _space(hello: Mapping[str, Any], what: str) -> spaces.Space[Any]:
    """The gymnasium space of a description."""
    given = hello.get(what)
    try:
        assert isinstance(given, Mapping)
        if "discrete" in given:
            return spaces.Discrete(int(given["discrete"]))
        dtype = str(given["dtype"])
        assert dtype in _DTYPES
        shape = tuple(int(length) for length in given["shape"])
        low = np.broadcast_to(np.asarray(given["low"], dtype), shape)
        high = np.broadcast_to(np.asarray(given["high"], dtype), shape)
        return spaces.Box(low, high, shape, np.dtype(dtype).type)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise EnvError(
            f"the simulators' {what} space is {given!r}, expected {{'discrete': n}} or "
            f"{{'shape': [...], 'dtype': one of {', '.join(_DTYPES)}, 'low': x, 'high': x}}"
        ) from None


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the batch; options as in `DEFAULTS`.

    Raises:
      EnvError: an option that cannot work, or simulators that don't come.
    """
    resolved = resolve_options(name, options, DEFAULTS)
    for key in ("connect_timeout_s", "step_timeout_s"):
        check_range(name, resolved, key, 1e-3)
    check_range(name, resolved, "frame_stack", 1)
    check_range(name, resolved, "max_episode_steps", 0)
    if not resolved["command"] and not resolved["socket_dir"]:
        raise EnvError(
            f"{name}: give the option command, which starts a simulator, or socket_dir, where "
            "simulators that are started otherwise find their socket"
        )
    return ExternalBatch(name, seeds[:num_envs], resolved)
