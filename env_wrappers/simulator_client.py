"""Reference client for external simulators: one file without dependencies, made to be copied.

A simulator connects to the socket of the actor that steps it, tells its spaces, and then answers
RESET and STEP until CLOSE. docs/external-simulators.md describes the protocol. The file runs on
Python 3.7 and newer, so it serves programs that embed an old interpreter, too.

    serve({"observation": {"shape": [2], "dtype": "float32", "low": -1, "high": 1},
           "action": {"discrete": 3}}, Pendulum())
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, Dict, Optional, Tuple

VERSION = 1
MAGIC = b"HPCRLSIM"
TOKEN_BYTES = 64

HELLO, WELCOME, RESET, STEP, STATE, CLOSE, ERROR = 1, 2, 3, 4, 5, 6, 255

HEADER = struct.Struct("<II")
"""Type of the message, and bytes that follow."""
WELCOME_BODY = struct.Struct("<IIQ")
"""Version, index of the simulator among those of its socket, seed."""
RESET_BODY = struct.Struct("<Q")
"""Seed of the episode's random numbers; 0: go on with those of before."""
STATE_HEAD = struct.Struct("<fBBH")
"""Reward, terminated, truncated, 0; the observation's bytes follow."""

LONGEST_BYTES = 2**28

SOCKET_VARIABLE = "HPCRL_SIMULATOR_SOCKET"
TOKEN_VARIABLE = "HPCRL_SIMULATOR_TOKEN_FILE"


class ProtocolError(Exception):
    """The other end broke the protocol, refused, or fell silent; the message says which."""


def send_message(connection: socket.socket, kind: int, body: bytes = b"") -> None:
    """Send one message."""
    connection.sendall(HEADER.pack(kind, len(body)) + body)


def receive_message(connection: socket.socket) -> Tuple[int, bytes]:
    """Wait for one message, for as long as the socket's time-out.

    Raises:
      ProtocolError: none came in time, the other end is gone, or it reports an error.
    """
    kind, length = HEADER.unpack(_receive(connection, HEADER.size, "a message"))
    if length > LONGEST_BYTES:
        raise ProtocolError(f"a message of {length} bytes: the other end doesn't speak hpcrl")
    body = _receive(connection, length, f"a message of type {kind}") if length else b""
    if kind == ERROR:
        raise ProtocolError(body.decode("utf-8", "replace"))
    return kind, body


def _receive(connection: socket.socket, count: int, what: str) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except socket.timeout:
            raise ProtocolError(
                f"{len(data)} of {count} bytes of {what} came within "
                f"{connection.gettimeout():g} s, then nothing"
            ) from None
        except ConnectionError:
            part = b""
        if not part:
            cut = f" after {len(data)} of {count} bytes of {what}" if data else ""
            raise ProtocolError(f"the other end closed the connection{cut}")
        data += part
    return bytes(data)


class Client:
    """A simulator's end.

    Args:
      spaces: `{"observation": {"shape", "dtype", "low", "high"} or {"discrete": n},
        "action": the same}`; dtype is float32, float64, int32 or uint8.
      path: of the socket; None takes it from the variable that hpcrl sets.
      token_file: likewise.
      timeout_s: longest wait for the welcome.

    Attributes:
      index: of this simulator among those of its actor.
      seed: for its random numbers.

    Raises:
      ProtocolError: hpcrl refuses: another version, another token, wrong spaces.
      OSError: nobody listens there.
    """

    def __init__(
        self,
        spaces: Dict[str, Any],
        path: Optional[str] = None,
        token_file: Optional[str] = None,
        timeout_s: float = 30.0,
    ):
        with open(token_file or os.environ[TOKEN_VARIABLE], "rb") as file:
            token = file.read().strip()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(timeout_s)
        self._connection.connect(path or os.environ[SOCKET_VARIABLE])
        body = MAGIC + struct.pack("<I", VERSION) + token.ljust(TOKEN_BYTES, b"\0")
        send_message(self._connection, HELLO, body + json.dumps(spaces).encode())
        kind, body = receive_message(self._connection)
        if kind != WELCOME:
            raise ProtocolError(f"message {kind} came instead of the welcome")
        _, self.index, self.seed = WELCOME_BODY.unpack(body)
        self._connection.settimeout(None)

    def receive(self) -> Tuple[int, bytes]:
        """Wait for RESET, STEP (the action's bytes) or CLOSE."""
        return receive_message(self._connection)

    def send_state(
        self,
        observation: bytes,
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> None:
        """Answer RESET or STEP; `observation` holds the array's bytes, little endian, C order."""
        head = STATE_HEAD.pack(reward, terminated, truncated, 0)
        send_message(self._connection, STATE, head + observation)

    def send_error(self, text: str) -> None:
        """Say what is wrong instead of answering."""
        send_message(self._connection, ERROR, text.encode())

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def serve(spaces: Dict[str, Any], simulator: Any, client: Optional[Client] = None) -> None:
    """Serve a simulator until hpcrl says CLOSE or is gone.

    Args:
      spaces: as `Client`.
      simulator: with `reset(seed) -> observation`, where seed 0 means to go on, and
        `step(action) -> (observation, reward, terminated, truncated)`. The action comes as bytes;
        an observation is bytes or has `tobytes()`.
      client: a connected one, else one is made from the variables that hpcrl sets.
    """
    client = client or Client(spaces)
    while True:
        try:
            kind, body = client.receive()
        except ProtocolError:
            return
        if kind == CLOSE:
            break
        try:
            if kind == RESET:
                state: Any = (simulator.reset(RESET_BODY.unpack(body)[0]),)
            else:
                state = simulator.step(body)
        except Exception as error:
            client.send_error(f"{type(error).__name__}: {error}")
            raise
        first = state[0]
        client.send_state(first if isinstance(first, bytes) else first.tobytes(), *state[1:])
    client.close()
