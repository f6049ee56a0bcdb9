"""A recorder that is killed while its segment is open.

    python -m tests.analysis.killed_recorder FOLDER EPISODES

Records EPISODES and more in FOLDER, and kills itself once as many are flushed. What is recorded
follows from an episode's environment and number (`expected`).
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from hpcrl.comm.wire import row_fields
from hpcrl.config.load import parse_config
from hpcrl.recording import Recorder, segment
from hpcrl.recording.recorder import describe
from hpcrl.specs import ArraySpec
from tests.recording_tools import IMAGES
from tests.small import BASE, env_spec, merged

NUM_ENVS = 4
SCALAR = ArraySpec((), "float32")


def expected(env_id, episode):
    """Frames `[T, 20, 24]`, rewards `[T]` and, where it is truncated, the last observation."""
    length = 1 + (episode + env_id) % 7
    step = np.arange(length + 1)
    noise = np.random.default_rng([env_id, episode]).integers(0, 200, (20, 24))
    frames = (noise + step[:, None, None]).astype(np.uint8)
    rewards = (100 * env_id + episode + step[:length] / 8).astype(np.float32)
    return frames[:length], rewards, frames[-1] if episode % 2 else None


def rows_of(env_id):
    """Yield the rows of one environment, one after the other, without end."""
    episode, reward, terminated = 0, 0.0, False
    while True:
        frames, rewards, final = expected(env_id, episode)
        for step, frame in enumerate(frames):
            yield frame, reward, step == 0, terminated, False
            reward, terminated = rewards[step], False
        if final is None:
            terminated = True
        else:
            yield final, reward, False, False, True
        episode += 1


def main() -> None:
    """Record, and die."""
    folder, wanted = Path(sys.argv[1]), int(sys.argv[2])
    segment.FLUSH_S = 0.0
    config = parse_config(merged(BASE, {"env": IMAGES, "recording": {"enabled": True}}))
    spec, behaviour = env_spec(config.env.name, **config.env.options), {"log_prob": SCALAR}
    attributes = {**describe(config, "inference", 0, 1, "0.1.0"), "topology": "{}"}
    seeds = {index: 100 + index for index in range(NUM_ENVS)}
    recorder = Recorder(folder, config.recording, spec, behaviour, seeds, attributes, 0)
    fields = row_fields(spec, behaviour)
    streams = [rows_of(env_id) for env_id in range(NUM_ENVS)]
    while recorder._segment is None or recorder._segment.flushed_episodes < wanted:
        rows = {n: np.zeros((NUM_ENVS, *s.shape), s.dtype) for n, s in fields.items()}
        names = ("obs:obs", "reward", "start", "terminated", "final")
        for env_id, stream in enumerate(streams):
            for name, value in zip(names, next(stream), strict=True):
                rows[name][env_id] = value
        recorder.add(np.arange(NUM_ENVS), rows)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
