"""Jobs whose environment, not isolated, goes wrong in the middle: a message, code 2, no hang."""

import textwrap

import psutil
import pytest

from hpcrl.exit_codes import USAGE
from tests.job_runner import run_to_end
from tests.jobs.test_end_to_end import write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(200)]

HALF = """
    import os
    import socket
    import struct
    import time

    def read(count):
        data = b""
        while len(data) < count:
            data += connection.recv(count - len(data))
        return data

    def send(kind, body):
        connection.sendall(struct.pack("<II", kind, len(body)) + body)

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["HPCRL_SIMULATOR_SOCKET"])
    token = open(os.environ["HPCRL_SIMULATOR_TOKEN_FILE"], "rb").read().ljust(64, b"\\0")
    spaces = '{"observation": {"shape": [1], "dtype": "float32", "low": 0, "high": 1}, '
    spaces += '"action": {"discrete": 2}}'
    send(1, b"HPCRLSIM" + struct.pack("<I", 1) + token + spaces.encode())
    for answered in range(40):
        kind, size = struct.unpack("<II", read(8))
        read(size)
        if kind in (3, 4):
            send(5, bytes(12))
    connection.sendall(struct.pack("<II", 5, 12) + bytes(7))
    time.sleep(1000)
"""


def check_named(config, message, mark):
    code, output = run_to_end(config, timeout_s=150)
    assert code == USAGE, output
    assert message in output
    left = [p for p in psutil.process_iter(["cmdline"]) if mark in str(p.info["cmdline"])]
    assert not left


def test_a_simulator_that_sends_half_a_message(tmp_path):
    program = tmp_path / "half.py"
    program.write_text(textwrap.dedent(HALF))
    options = {"command": ["{python}", str(program)], "step_timeout_s": 2.0}
    config, _ = write_config(
        tmp_path,
        env={"name": "external:half", "options": options, "envs_per_actor": 2},
        stop={"agent_steps": 10**7},
    )
    message = "7 of 12 bytes of a message of type 5 came within 2 s, then nothing"
    check_named(config, message, str(program))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", ": observation leaf 'obs': expected shape (3,), got (2,)"),
        ("reward", "tests.broken_envs:make: reward of environment"),
    ],
)
def test_an_environment_that_violates_its_space(tmp_path, fault, message):
    options = {"log": str(tmp_path / "faults"), "faults": [fault], "mean_steps": 60}
    config, run_dir = write_config(
        tmp_path,
        env={"name": "tests.broken_envs:make", "options": options},
        stop={"agent_steps": 10**7},
    )
    check_named(config, message, str(run_dir))
