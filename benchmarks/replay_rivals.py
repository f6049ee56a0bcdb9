"""dm-reverb and cpprb on the work of `replay.py`; runs where those are installed.

    python replay_rivals.py FRAMES.npy BATCH NUM_PRIORITIES

Prints one line of JSON. Imports nothing of hpcrl. Reverb's server is sampled from within its
own process, where it bypasses gRPC: its fastest way.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

ALPHA = 0.9
UNROLL = 80
SEQUENCE = 120


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def quiet_time(function, repeats: int) -> float:
    """Seconds per call, the 10th percentile, as in `replay.py`."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return float(np.percentile(times, 10))


def make_server(max_size: int):
    reverb = importlib.import_module("reverb")
    table = reverb.Table(
        "replay",
        sampler=reverb.selectors.Prioritized(ALPHA),
        remover=reverb.selectors.Fifo(),
        max_size=max_size,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    return reverb.Server(tables=[table])


def measure_reverb_sequences(frames: np.ndarray, batch: int) -> dict[str, float]:
    """Fill with overlapping sequences (chunks are shared), then sample batches of them."""
    server = make_server(100_000)
    client = server.localhost_client()
    before = resident_bytes()
    begin = time.perf_counter()
    for env_frames in frames:
        with client.trajectory_writer(num_keep_alive_refs=SEQUENCE + 1) as writer:
            for t, frame in enumerate(env_frames):
                step = {"frame": frame, "reward": np.float32(0), "action": np.int32(0)}
                writer.append(step)
                if t + 1 >= SEQUENCE and (t + 1 - SEQUENCE) % UNROLL == 0:
                    last = {name: writer.history[name][-SEQUENCE:] for name in step}
                    writer.create_item("replay", 1.0, last)
                    writer.flush(block_until_num_items=4)
            writer.flush()
    insert_s = time.perf_counter() - begin
    grown = resident_bytes() - before

    def sample() -> list:
        return list(client.sample("replay", num_samples=batch, emit_timesteps=False))

    out = np.empty((SEQUENCE, batch, *frames.shape[2:]), np.uint8)

    def assemble() -> None:
        for b, item in enumerate(sample()):
            out[:, b] = next(column for column in item.data if column.ndim == 3)

    sample_s, assemble_s = quiet_time(sample, 20), quiet_time(assemble, 20)
    num_steps = frames.shape[0] * frames.shape[1]
    result = {
        "added_steps_per_s": num_steps / insert_s,
        "resident_bytes_per_step": grown / num_steps,
        "sequences_per_s": batch / sample_s,
        "sequences_per_s_in_one_batch_array": batch / assemble_s,
    }
    server.stop()
    return result


def measure_reverb_priorities(batch: int, num_priorities: int) -> dict[str, float]:
    """Draw from, and update priorities of, items of one number each."""
    server = make_server(num_priorities)
    client = server.localhost_client()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for i in range(num_priorities):
            writer.append({"x": np.float32(i)})
            writer.create_item("replay", 1.0 + i % 7, {"x": writer.history["x"][-1:]})
            if i % 1000 == 999:
                writer.flush()
        writer.flush()

    def draw_and_update() -> None:
        drawn = client.sample("replay", num_samples=batch, emit_timesteps=False)
        client.mutate_priorities("replay", updates={item.info.key: 2.0 for item in drawn})

    result = {"draw_and_update_us": 1e6 * quiet_time(draw_and_update, 50)}
    server.stop()
    return result


def measure_cpprb(batch: int, num_priorities: int) -> dict[str, float]:
    """The same with cpprb's segment tree in C++, one number per item."""
    cpprb = importlib.import_module("cpprb")
    buffer = cpprb.PrioritizedReplayBuffer(num_priorities, {"x": {"shape": 1}}, alpha=ALPHA)
    rng = np.random.default_rng(0)
    values = np.arange(num_priorities, dtype=np.float32)
    buffer.add(x=values, priorities=rng.exponential(size=num_priorities))
    new = rng.exponential(size=batch)

    def draw_and_update() -> None:
        drawn = buffer.sample(batch, beta=0.6)
        buffer.update_priorities(drawn["indexes"], new)

    return {"draw_and_update_us": 1e6 * quiet_time(draw_and_update, 400)}


def main() -> int:
    path, batch, num_priorities = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    frames = np.load(path)
    results = {
        f"dm-reverb {version('dm-reverb')}": {
            **measure_reverb_sequences(frames, batch),
            **measure_reverb_priorities(batch, num_priorities),
        },
        f"cpprb {version('cpprb')}": measure_cpprb(batch, num_priorities),
    }
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
