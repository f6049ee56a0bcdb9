"""What the replay shard costs, against limits measured beside it in the same run.

    python benchmarks/replay.py --json benchmarks/results/replay.json \
        [--reverb-python VENV/bin/python]

Questions:

- gather: a batch of 64 Atari sequences of 120 rows (burn-in 39, 80 loss rows, bootstrap),
  drawn and gathered, against one memcpy of the same bytes. At least half as fast.
- priorities: 64 draws and 64 updates among 100 000 items, against doing the same in O(N):
  p**alpha over all priorities, normalized, `Generator.choice`. At least 20 times faster.
  (A second O(N) method, a running sum over stored p**alpha, is reported beside it.)
- memory: bytes allocated per stored agent step over one frame plus its scalars. At most 1.05.
- compression and files: size and speed of each codec on frames of real games, and how fast a
  shard is written to a temporary file and read back.

With `--reverb-python`, an interpreter that has dm-reverb (and cpprb) installed runs
`replay_rivals.py` on the same frames.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcrl.compression import available_codecs
from hpcrl.replay.files import load_shards
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.memory import replay_bytes
from hpcrl.replay.prioritized import PrioritizedSampler
from hpcrl.replay.records import ReplayUnroll
from hpcrl.replay.shard_writer import save_shard
from hpcrl.replay.storage import ReplayShard
from hpcrl.specs import ArraySpec

BATCH = 64
NUM_PRIORITIES = 100_000
ALPHA = 0.9
NUM_ENVS = 8
UNROLLS_PER_ENV = 25


def atari_layout() -> ReplayLayout:
    """One agent step of R2D2 on Atari, and an LSTM state of 2 x 512 per item."""
    number, flag = ArraySpec((), "float32"), ArraySpec((), "bool")
    rows = {
        "frame": ArraySpec((84, 84), "uint8"),
        "reward": number,
        "terminated": flag,
        "start": flag,
        "final": flag,
        "action": ArraySpec((1,), "int32"),
        "policy_version": ArraySpec((), "int64"),
    }
    items = {"core_state": ArraySpec((1024,), "float32")}
    return ReplayLayout(rows, items, unroll_length=80, burn_in=39, stacks={"frame": 4})


def record_frames(game: str, num_steps: int) -> np.ndarray:
    """Return `<uint8>[NUM_ENVS, num_steps, 84, 84]` of random play."""
    from ale_py.vector_env import AtariVectorEnv

    envs = AtariVectorEnv(game, num_envs=NUM_ENVS, stack_num=1)
    rng = np.random.default_rng(0)
    frames = np.empty((NUM_ENVS, num_steps, 84, 84), np.uint8)
    observation, _ = envs.reset(seed=0)
    num_actions = int(getattr(envs.single_action_space, "n", 0))
    for t in range(num_steps):
        frames[:, t] = observation[:, 0]
        observation = envs.step(rng.integers(0, num_actions, NUM_ENVS))[0]
    envs.close()
    return frames


def filled_shard(frames: np.ndarray, compression: str = "none") -> ReplayShard:
    """A full shard that holds the frames of all environments."""
    layout = atari_layout()
    capacity = NUM_ENVS * UNROLLS_PER_ENV
    shard = ReplayShard(layout, capacity, NUM_ENVS, ALPHA, compression=compression)
    length = layout.unroll_length
    rng = np.random.default_rng(1)
    for k in range(UNROLLS_PER_ENV):
        for env in range(NUM_ENVS):
            steps = slice(k * length, (k + 1) * length + 1)
            rows = {
                path: np.zeros((length + 1, *spec.shape), spec.dtype)
                for path, spec in layout.rows.items()
            }
            rows["frame"] = frames[env, steps]
            state = {"core_state": np.zeros((1, 1024), np.float32)}
            shard.add(ReplayUnroll(env, 0, k, rows, state, rng.random(1)))
    return shard


def quiet_times(rounds: int, calls: int, *functions: Callable[[], object]) -> list[float]:
    """Seconds per call of each function on a quiet machine: the 10th percentile of all calls.

    Other load only ever makes a call slower, and large arrays suffer more from it than small
    ones, so that medians on a busy machine would flatter the tree. The functions take turns of
    `calls` calls in a row; the first call of a turn pays for what the others left in the caches
    and is not counted.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            for call in range(calls + 1):
                begin = time.perf_counter()
                function()
                if call:
                    taken.append(time.perf_counter() - begin)
    return [float(np.percentile(taken, 10)) for taken in times]


def measure_gather(frames: np.ndarray, rounds: int) -> dict[str, float]:
    shard = filled_shard(frames)
    rng = np.random.default_rng(2)
    buffers = shard.make_buffers(BATCH)
    num_bytes = sum(a.nbytes for a in (*buffers.rows.values(), *buffers.items.values()))
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    copy_s, sample_s = quiet_times(
        rounds,
        3,
        lambda: np.copyto(target, source),
        lambda: shard.sample(BATCH, rng, out=buffers),
    )
    return {
        "sequences": BATCH,
        "rows_per_sequence": shard.layout.window,
        "bytes": num_bytes,
        "memcpy_ms": 1e3 * copy_s,
        "draw_and_gather_ms": 1e3 * sample_s,
        "sequences_per_s": BATCH / sample_s,
        "gather_over_memcpy_speed": copy_s / sample_s,
    }


def measure_priorities(rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(3)
    priorities = rng.exponential(size=NUM_PRIORITIES)
    sampler = PrioritizedSampler(NUM_PRIORITIES, ALPHA)
    sampler.add(priorities)
    new = rng.exponential(size=BATCH)
    flat, powered = priorities.copy(), priorities**ALPHA

    def tree() -> None:
        draw = sampler.sample(BATCH, rng)
        sampler.update(draw.slots, draw.generations, new)

    def linear() -> None:
        p = flat**ALPHA
        slots = rng.choice(NUM_PRIORITIES, BATCH, p=p / p.sum())
        flat[slots] = new

    def running_sum() -> None:
        sums = np.cumsum(powered)
        slots = np.searchsorted(sums, rng.random(BATCH) * sums[-1], side="right")
        powered[slots] = new**ALPHA

    tree_s, linear_s, running_s = quiet_times(rounds, 50, tree, linear, running_sum)
    # As in training, where every draw follows a gather that filled the caches.
    sweep = np.ones(1 << 26, np.uint8)
    cold: dict[Callable[[], None], list[float]] = {tree: [], linear: []}
    for _ in range(rounds + 10):
        for function, taken in cold.items():
            np.add.reduce(sweep)
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return {
        "items": NUM_PRIORITIES,
        "draws_and_updates": BATCH,
        "tree_us": 1e6 * tree_s,
        "linear_us": 1e6 * linear_s,
        "linear_running_sum_us": 1e6 * running_s,
        "linear_over_tree": linear_s / tree_s,
        "running_sum_over_tree": running_s / tree_s,
        "tree_after_a_gather_us": 1e6 * float(np.percentile(cold[tree], 10)),
        "linear_after_a_gather_us": 1e6 * float(np.percentile(cold[linear], 10)),
    }


def measure_memory(frames: np.ndarray) -> dict[str, float]:
    layout = atari_layout()
    shard = filled_shard(frames)
    steps, payload = shard.num_stored_rows, layout.row_bytes
    stacked = payload + 3 * layout.rows["frame"].nbytes
    overlapping = payload * (layout.window + 3) / layout.unroll_length
    capacity = 100_000
    return {
        "stored_steps": steps,
        "bytes_per_step": shard.nbytes / steps,
        "frame_and_scalars_bytes": payload,
        "bytes_over_frame_and_scalars": shard.nbytes / steps / payload,
        "stacked_storage_over_ours": stacked / (shard.nbytes / steps),
        "storage_with_overlap_over_ours": overlapping / (shard.nbytes / steps),
        "gib_for_100k_unrolls": replay_bytes(layout, capacity, 640) / 2**30,
    }


def measure_compression(frames_by_game: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for game, frames in frames_by_game.items():
        for codec in available_codecs():
            begin = time.perf_counter()
            shard = filled_shard(frames, codec)
            fill_s = time.perf_counter() - begin
            rng = np.random.default_rng(4)
            buffers = shard.make_buffers(BATCH)
            (sample_s,) = quiet_times(
                2, 5, lambda s=shard, r=rng, b=buffers: s.sample(BATCH, r, out=b)
            )
            results[f"{game}/{codec}"] = {
                "bytes_per_step": shard.nbytes / shard.num_stored_rows,
                "added_steps_per_s": shard.num_stored_rows / fill_s,
                "sequences_per_s": BATCH / sample_s,
                **measure_files(shard),
            }
    return results


def measure_files(shard: ReplayShard) -> dict[str, float]:
    """Write and read back a shard; speeds in agent steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        begin = time.perf_counter()
        num_bytes = save_shard(shard, path)
        saved = time.perf_counter()
        capacity = shard.capacity_unrolls
        empty = ReplayShard(shard.layout, capacity, NUM_ENVS, ALPHA, compression=shard.compression)
        report = load_shards([path], empty)
        loaded = time.perf_counter()
    if report.items != shard.size or report.errors:
        raise SystemExit(f"the shard did not come back: {report}")
    return {
        "file_bytes_per_step": num_bytes / shard.num_stored_rows,
        "saved_steps_per_s": shard.num_stored_rows / (saved - begin),
        "loaded_steps_per_s": shard.num_stored_rows / (loaded - saved),
    }


def measure_rivals(python: str, frames: np.ndarray) -> dict[str, object]:
    """Run `replay_rivals.py` with another interpreter on the same frames."""
    script = Path(__file__).with_name("replay_rivals.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frames.npy"
        np.save(path, frames)
        command = [python, str(script), str(path), str(BATCH), str(NUM_PRIORITIES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="one game and few repetitions")
    parser.add_argument("--reverb-python", help="interpreter that has dm-reverb and cpprb")
    arguments = parser.parse_args()
    num_steps = UNROLLS_PER_ENV * atari_layout().unroll_length + 1
    names = ("breakout",) if arguments.quick else ("breakout", "pong")
    rounds = 2 if arguments.quick else 20
    games = {game: record_frames(game, num_steps) for game in names}
    results: dict[str, object] = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average_1min": os.getloadavg()[0],
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "gather": measure_gather(games["breakout"], rounds),
        "priorities": measure_priorities(rounds),
        "memory": measure_memory(games["breakout"]),
        "compression": measure_compression(games),
    }
    if arguments.reverb_python:
        results["rivals"] = measure_rivals(arguments.reverb_python, games["breakout"])
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return int(not within_limits(results))


def within_limits(results: dict) -> bool:
    """Print each limit with its verdict."""
    limits = [
        ("gather / memcpy speed", results["gather"]["gather_over_memcpy_speed"], ">=", 0.5),
        ("O(N) / tree time", results["priorities"]["linear_over_tree"], ">=", 20.0),
        ("bytes / payload", results["memory"]["bytes_over_frame_and_scalars"], "<=", 1.05),
    ]
    verdicts = []
    for name, value, relation, limit in limits:
        verdicts.append(value >= limit if relation == ">=" else value <= limit)
        verdict = "ok" if verdicts[-1] else "NOT MET"
        print(f"{name}: {value:.3f} {relation} {limit}: {verdict}", file=sys.stderr)
    return all(verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
