"""Writers that are killed: before each of their file operations in turn, or at random times.

    LD_PRELOAD=kill_points.so python killed_writer.py FOLDER
    python killed_writer.py FOLDER SEED

FOLDER/inference-0-N is what kill N left, FOLDER/N.txt what the writer had been told by then:
segment, episodes and steps flushed in it, or "closed".
"""

import ctypes
import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

from hpcrl.recording import SegmentWriter
from hpcrl.specs import ArraySpec
from tests.recording_tools import append_episode

COLUMNS = {
    "observation/obs": ArraySpec((84, 84), "uint8"),
    "action": ArraySpec((1,), "int32"),
    "reward": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
    "policy_version": ArraySpec((), "int64"),
}
ENV = '{"observation": {"obs": {"array": {"shape": [84, 84], "dtype": "uint8"}}}}'
EPISODES = 12
RANDOM_EPISODES = 250
RANDOM_KILLS = 20


def write(path: Path, first: int, episodes: int, end, told: int = -1, **options) -> None:
    """Write a segment of episodes `first` and on, and tell the file `told` how far it is."""
    attributes = {"env": ENV, "fraction": 1.0, "config": "key: value\n" * 500}
    writer = SegmentWriter(path, COLUMNS, attributes, "gzip-1", **options)
    for number in range(first, first + episodes):
        append_episode(writer, COLUMNS, number)
        if told >= 0:
            state = path.stem, writer.flushed_episodes, writer.flushed_steps
            os.write(told, b"%s %d %d\n" % (state[0].encode(), *state[1:]))
    writer.close(end, {"dropped_episodes": 7})
    if told >= 0:
        os.write(told, b"closed\n")


def start(root: Path, name: int, body) -> int:
    """Fork; return the child's id. The child calls `body` with its folder and where to tell."""
    folder = root / f"inference-0-{name}"
    folder.mkdir()
    told = os.open(root / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
    child = os.fork()
    if child == 0:
        body(folder, told)
        os._exit(0)
    os.close(told)
    return child


def kill_at_each_operation(root: Path) -> int:
    """Kill until the writer comes through."""
    preloaded = ctypes.CDLL(None)
    for operation in count(1):

        def body(folder, told, operation=operation):
            moments = count(0.0, 1e6)  # whole chunks are written at once
            preloaded.kill_before(operation)
            path = folder / "seg-00000.h5"
            write(path, 0, EPISODES, "finished", told, clock=lambda: next(moments))

        _, status = os.waitpid(start(root, operation, body), 0)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        if os.WTERMSIG(status) != signal.SIGKILL:
            return 1
    return 1


def kill_at_random_times(root: Path, seed: int) -> int:
    """Kill a writer of one segment after the other, some of them after the first rotation."""

    def body(folder, told):
        for segment in count():
            path = folder / f"seg-{segment:05d}.h5"
            write(path, segment * RANDOM_EPISODES, RANDOM_EPISODES, "followed", told)

    rng = random.Random(seed)
    for attempt in range(RANDOM_KILLS):
        child = start(root, attempt, body)
        while not (root / f"{attempt}.txt").stat().st_size:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    if len(sys.argv) > 2:
        sys.exit(kill_at_random_times(FOLDER, int(sys.argv[2])))
    sys.exit(kill_at_each_operation(FOLDER))
