"""Simulators over a socket: the protocol by hand, both reference clients, and every bad peer."""

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from env_wrappers import EnvError, IsolatedBatch, Isolation, make
from env_wrappers.examples.pole_simulator import SPACES, Pole
from env_wrappers.simulator_client import Client, ProtocolError, serve

ROOT = Path(__file__).resolve().parent.parent.parent
POLE_PY = [sys.executable, "-m", "env_wrappers.examples.pole_simulator"]
TOKEN = b"0123456789abcdef"


@pytest.fixture(scope="module")
def pole_c(tmp_path_factory):
    program = tmp_path_factory.mktemp("c") / "pole_simulator"
    source = ROOT / "env_wrappers" / "examples" / "pole_simulator.c"
    flags = ["-std=c99", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", program, source, "-lm"], check=True, timeout=100)
    return [str(program)]


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert not psutil.Process().children(recursive=True)


def external(num_envs=2, **options):
    options = {"connect_timeout_s": 20.0, "step_timeout_s": 20.0, **options}
    return make("external:test", num_envs, range(num_envs), options)


@pytest.mark.parametrize("language", ["python", "c"])
def test_a_reference_client_steps_the_dynamics_of_cartpole(language, pole_c):
    batch = external(3, command=POLE_PY if language == "python" else pole_c)
    step = batch.reset()
    twin = CartPoleEnv()
    rng = np.random.default_rng(0)
    starts = {tuple(row) for row in step.observation["obs"].tolist()}
    assert len(starts) == 3
    ends = 0
    for _ in range(200):
        before = step.observation["obs"]
        actions = rng.integers(0, 2, (3, 1)).astype(np.int32)
        step = batch.step(actions)
        for row in range(3):
            twin.reset()
            twin.state = before[row].astype(np.float64)
            after, reward, fallen, _, _ = twin.step(int(actions[row, 0]))
            assert step.reward[row] == reward == 1
            assert step.terminated[row] == fallen
            if fallen:
                ends += 1
                assert (np.abs(step.observation["obs"][row]) <= 0.05).all()
            else:
                np.testing.assert_allclose(step.observation["obs"][row], after, atol=1e-4)
    assert ends > 5
    batch.close()


def test_truncation_comes_from_the_simulator_or_from_the_option(pole_c):
    for options, length in (({}, 500), ({"max_episode_steps": 7}, 7)):
        batch = external(1, command=pole_c, **options)
        step = batch.reset()
        while not step.truncated.any():
            lean = step.observation["obs"][0] @ [0.1, 0.4, 3.0, 1.0]  # balances
            step = batch.step(np.array([[lean > 0]], np.int32))
            assert not step.terminated.any()
        assert step.episode_steps[0] == step.episode_return[0] == length
        assert np.abs(step.observation["obs"]).max() <= 0.05
        assert not np.array_equal(step.final_observation["obs"], step.observation["obs"])
        batch.close()


def test_the_same_seeds_give_the_same_episodes(pole_c):
    firsts = []
    for _ in range(2):
        batch = external(2, command=pole_c)
        firsts.append(batch.reset().observation["obs"])
        batch.close()
    np.testing.assert_array_equal(*firsts)


def hello(token=TOKEN, version=1, magic=b"HPCRLSIM", spaces=SPACES):
    text = spaces if isinstance(spaces, bytes) else json.dumps(spaces).encode()
    body = magic + struct.pack("<I", version) + token.ljust(64, b"\0") + text
    return struct.pack("<II", 1, len(body)) + body


class Peer:
    """Something that connects to the socket of a folder and talks by hand."""

    def __init__(self, folder, *sent, after=None):
        self.answer = b""
        self._folder, self._sent, self._after = folder, sent, after
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        if self._after:
            self._after.join()
        end_s = time.monotonic() + 20.0
        while not (found := list(self._folder.glob("*.sock"))) and time.monotonic() < end_s:
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            while connection.connect_ex(str(found[0])):
                time.sleep(0.01)
            self.mode = stat.S_IMODE(os.stat(found[0].parent).st_mode)
            connection.settimeout(20.0)
            with contextlib.suppress(ConnectionError):
                self._talk(connection)

    def _talk(self, connection):
        for data in self._sent:
            connection.sendall(data)
            self.answer += connection.recv(4096)
        while part := connection.recv(4096):
            self.answer += part

    def join(self):
        self._thread.join(30.0)
        assert not self._thread.is_alive()


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (hello(token=b"another token!!!"), "wrong token"),
        (hello(token=b""), "wrong token"),
        (hello(version=2), "it speaks version 2 of the protocol, hpcrl version 1"),
        (hello(magic=b"GET / HT"), "its first message is no hello"),
        (b"GET / HTTP/1.1\r\n\r\n", "doesn't speak hpcrl"),
        (hello(spaces=b"{"), "its spaces are no JSON"),
        (hello()[:50], "of a message of type 1 came within 0.5 s, then nothing"),
        (hello()[:5], "5 of 8 bytes of a message came within 0.5 s, then nothing"),
    ],
)
def test_who_may_not_come_is_told_why_and_so_is_the_user(
    tmp_path, token_file, monkeypatch, data, message
):
    monkeypatch.setattr("env_wrappers.external._HELLO_S", 0.5)
    folder = tmp_path / "sockets"
    peer = Peer(folder, data)
    with pytest.raises(EnvError, match=rf"0 of 1 simulators connected.*refused: .*{message}"):
        external(1, socket_dir=str(folder), token_file=token_file, connect_timeout_s=2.0)
    peer.join()
    assert message.encode() in peer.answer
    assert peer.mode == 0o700
    assert not list(folder.glob("*.sock"))


def test_one_that_may_not_come_keeps_nobody_else_away(tmp_path, token_file):
    folder = tmp_path / "sockets"
    wrong = Peer(folder, hello(token=b"another token!!!"))
    right = Peer(folder, hello(), after=wrong)
    batch = external(1, socket_dir=str(folder), token_file=token_file)
    batch.close()
    wrong.join()
    right.join()
    kind, length, version, index, seed = struct.unpack("<IIIIQ", right.answer[:24])
    assert (kind, length, version, index, seed) == (2, 16, 1, 0, 1)
    assert struct.unpack("<II", right.answer[24:32]) == (6, 0), "CLOSE"


def test_no_simulator_is_a_clear_error_after_the_time_out(tmp_path):
    with pytest.raises(EnvError, match=r"0 of 2 simulators connected to .*within 0\.5 s$"):
        external(2, socket_dir=str(tmp_path / "s"), connect_timeout_s=0.5)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/nowhere/simulator"], r"/nowhere/simulator can't be started: No such file"),
        (["false"], r"0 of 2 simulators connected.*programs ended, exit codes \[1\]"),
        (["sleep", "1000"], r"0 of 2 simulators connected to .*within 1 s"),
    ],
)
def test_a_program_that_does_not_connect_is_a_clear_error(command, message):
    with pytest.raises(EnvError, match=message):
        external(2, command=command, connect_timeout_s=1.0)


STATE = struct.pack("<fBBH", 0.0, 0, 0, 0) + bytes(16)


def message_of(kind, body):
    return struct.pack("<II", kind, len(body)) + body


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (message_of(5, STATE)[:11], "3 of 24 bytes of a message of type 5 came within 0.5 s"),
        (message_of(5, STATE[:-4]), "sent message 5 of 20 bytes, expected a state of 24"),
        (message_of(6, b""), "sent message 6 of 0 bytes"),
        (message_of(255, b"out of fuel"), "simulator 0: out of fuel"),
        (b"", "0 of 8 bytes of a message came within 0.5 s"),
    ],
)
def test_a_simulator_that_breaks_off_is_named_and_nothing_hangs(
    tmp_path, token_file, answer, message
):
    folder = tmp_path / "sockets"
    peer = Peer(folder, hello(), message_of(5, STATE), answer)
    batch = external(1, socket_dir=str(folder), token_file=token_file, step_timeout_s=0.5)
    batch.reset()
    with pytest.raises(EnvError, match=message):
        batch.step(np.zeros((1, 1), np.int32))
    batch.close()
    peer.join()


def test_an_end_that_is_both_is_a_termination(tmp_path, token_file):
    folder = tmp_path / "sockets"
    both = struct.pack("<fBBH", 2.5, 1, 1, 0) + bytes(16)
    peer = Peer(folder, hello(), *(message_of(5, body) for body in (STATE, both, STATE)))
    batch = external(1, socket_dir=str(folder), token_file=token_file)
    batch.reset()
    step = batch.step(np.zeros((1, 1), np.int32))
    assert (step.terminated[0], step.truncated[0], step.reward[0]) == (True, False, 2.5)
    assert step.final_observation is None
    batch.close()
    peer.join()


def test_a_simulator_that_dies_is_named_with_its_exit_code(pole_c):
    batch = external(2, command=pole_c)
    batch.reset()
    last = batch._pids[1]
    next(program for program in batch._programs if program.pid == last).kill()
    with pytest.raises(EnvError, match=r"simulator 1: .*exit code -9"):
        batch.step(np.zeros((2, 1), np.int32))
    batch.close()


def test_isolated_simulators_that_die_are_started_again(pole_c):
    options = {"command": pole_c, "connect_timeout_s": 20.0}
    batch = IsolatedBatch("external:test", 2, [1, 2], options, Isolation())
    batch.reset()
    psutil.Process(batch._child.pid).children()[0].kill()
    restarted = False
    for _ in range(5):
        restarted |= bool(batch.step(np.zeros((2, 1), np.int32)).restarted.all())
    assert restarted
    assert batch.failures["garbage"] == 1
    batch.close()


def test_a_token_that_others_can_read_is_refused(tmp_path, token_file):
    os.chmod(token_file, 0o644)
    with pytest.raises(EnvError, match=r"can be read by others \(mode 644\): chmod 600"):
        external(1, command=POLE_PY, token_file=token_file)


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ({}, "observation space is None"),
        ({**SPACES, "action": {"discrete": 0}}, "action space is .*expected"),
        ({**SPACES, "observation": {"shape": [4], "dtype": "float16"}}, "float16"),
    ],
)
def test_spaces_that_are_none_are_a_clear_error(tmp_path, token_file, spaces, message):
    folder = tmp_path / "sockets"
    peer = Peer(folder, hello(spaces=spaces))
    with pytest.raises(EnvError, match=message):
        external(1, socket_dir=str(folder), token_file=token_file)
    peer.join()


def test_settings_that_start_nothing_are_refused():
    with pytest.raises(EnvError, match=r"give the option command.*or socket_dir"):
        external(1)


def test_a_python_client_says_what_hpcrl_answered(tmp_path, token_file):
    folder = tmp_path / "sockets"
    (tmp_path / "wrong").write_text("x" * 20)
    caught = []

    def connect():
        while not (found := list(folder.glob("*.sock"))):
            time.sleep(0.01)
        try:
            Client(SPACES, str(found[0]), str(tmp_path / "wrong"))
        except ProtocolError as error:
            caught.append(str(error))
        serve(SPACES, Pole(), Client(SPACES, str(found[0]), token_file))

    thread = threading.Thread(target=connect)
    thread.start()
    batch = external(1, socket_dir=str(folder), token_file=token_file)
    batch.reset()
    batch.close()
    thread.join(20)
    assert caught == ["wrong token"]


def test_the_reference_client_needs_only_the_standard_library_of_an_old_python():
    """It is copied into programs that hpcrl knows nothing of."""
    source = ROOT / "env_wrappers" / "simulator_client.py"
    old = Path("/root/.pyenv/versions/3.7.16/bin/python")
    python = str(old) if old.exists() else sys.executable
    subprocess.run([python, "-I", "-S", str(source)], check=True, timeout=60)
