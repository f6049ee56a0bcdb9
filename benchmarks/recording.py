"""What recording costs: training throughput with and without it, and reading what it wrote.

    python benchmarks/recording.py --json benchmarks/results/recording.json

Runs with and without recording alternate, so that a machine that slows down slows both. With --add
the pairs are added to those of the file, for a machine that is seldom quiet. Processor time is
what other programs on the machine disturb least: where ranks fill all cores, throughput is inverse
to it.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

from analysis.reader import Run
from analysis.throughput import weighted_mean
from env_wrappers import make
from hpcrl.comm.wire import row_fields
from hpcrl.config.sections import RecordingConfig
from hpcrl.recording import Recorder, SegmentWriter
from hpcrl.specs import ArraySpec, EnvSpec

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "breakout_demo.yaml"
EPISODE_STEPS = 200
PARTS = ("training", "recorder", "episode_index", "random_reads_s")


def train(folder, agent_steps, *options):
    """Train on Breakout; return the run and its processor seconds."""
    command = [sys.executable, "-m", "hpcrl", "train", str(CONFIG), "--run.dir", str(folder)]
    command += ["--stop.agent_steps", str(agent_steps), "--stop.wall_time_s", "0"]
    command += ["--metrics.tensorboard", "false", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(folder), cpu_s


def alternate(folder, pairs, agent_steps, *options, before=None):
    """Rates and processor time with `options` and without, and the runs with them.

    The pairs of `before`, figures of an earlier call, count, too.
    """
    kinds = {"with": options, "without": ()}
    start = {kind: train(folder / f"start-{kind}", 320, *kinds[kind])[1] for kind in kinds}
    before = before or {}
    rates = {kind: list(before.get("env_steps_per_s", {}).get(kind, [])) for kind in kinds}
    cpu_ms = {kind: list(before.get("cpu_ms_per_step", {}).get(kind, [])) for kind in kinds}
    runs = []
    for pair in range(pairs):
        for kind in ("with", "without") if pair % 2 == 0 else ("without", "with"):
            run, cpu_s = train(folder / f"{pair}-{kind}", agent_steps, *kinds[kind])
            rates[kind].append(weighted_mean(run.metrics().iloc[1:], "env_steps_per_s"))
            cpu_ms[kind].append(1e3 * (cpu_s - start[kind]) / agent_steps)
            if kind == "with":
                runs.append(run)
        print({kind: (rates[kind][-1], cpu_ms[kind][-1]) for kind in kinds}, flush=True)
    ratios = np.array(rates["with"]) / np.array(rates["without"])
    cpu_ratios = np.array(cpu_ms["without"]) / np.array(cpu_ms["with"])
    figures = {
        "env_steps_per_s": rates,
        "pairs": len(ratios),
        "median_ratio": float(np.median(ratios)),
        "quartiles_of_ratio": np.percentile(ratios, [25, 75]).tolist(),
        "cpu_ms_per_step": cpu_ms,
        "median_cpu_ratio": float(np.median(cpu_ratios)),
        "quartiles_of_cpu_ratio": np.percentile(cpu_ratios, [25, 75]).tolist(),
    }
    return figures, runs


def training_cost(folder, pairs, agent_steps, before):
    """What recording costs, and bytes per frame on disk."""
    recording = ("--recording.enabled", "true")
    figures, runs = alternate(folder, pairs, agent_steps, *recording, before=before)
    steps = sum(len(run.steps("reward")) for run in runs)
    nbytes = sum(segment.path.stat().st_size for run in runs for segment in run.segments)
    frame_bytes = sum(
        segment.file()["steps/observation/obs"].id.get_storage_size()
        for run in runs
        for segment in run.segments
    )
    dropped = [int(run.metrics()["dropped_episodes"].iloc[-1]) for run in runs]
    more = {
        "bytes_per_step_on_disk": nbytes / steps,
        "bytes_per_frame_on_disk": frame_bytes / steps,
        "dropped_episodes": dropped,
    }
    return figures | more


def recorder_cost(folder, envs=32, batch=16, steps=1500):
    """Processor time of a recorder per step of Breakout: in the acting thread, and with the writer.

    Frames of random play; rows come in batches, as an inference rank has them.
    """
    games = make("atari:Breakout", envs, list(range(envs)), {})
    spec = EnvSpec.from_json(games.spec)
    behaviour = {name: ArraySpec((), "float32") for name in ("log_prob", "value")}
    fields = row_fields(spec, behaviour)
    rng, moments = np.random.default_rng(0), []
    played = games.reset()
    for step in range(200):
        rows = {n: np.zeros((envs, *array.shape), array.dtype) for n, array in fields.items()}
        rows["obs:obs"][:] = played.observation["obs"]
        rows["terminated"][:] = played.terminated
        rows["start"][:] = rows["terminated"] | (step == 0)
        moments.append(rows)
        played = games.step(rng.integers(0, 4, (envs, 1)).astype(spec.action.dtype))
    games.close()
    seeds = dict.fromkeys(range(envs), 0)
    attributes = {"fraction": 1.0, "config": ""}
    before = time.process_time()
    recorder = Recorder(
        folder, RecordingConfig(enabled=True), spec, behaviour, seeds, attributes, 0
    )
    acting_s = 0.0
    for step in range(steps):
        rows = moments[step % len(moments)]
        for first in range(0, envs, batch):
            part = {name: values[first : first + batch] for name, values in rows.items()}
            start = time.thread_time()
            recorder.add(np.arange(first, first + batch), part)
            acting_s += time.thread_time() - start
        time.sleep(0.002)  # the writer keeps up, as it does in training
    recorder.close()
    total_s = time.process_time() - before
    per_step = 1e6 / (steps * envs)
    return {"acting_us_per_step": per_step * acting_s, "cpu_us_per_step": per_step * total_s}


def generate(folder, steps, frame_shape):
    """A run of `steps` in episodes of 200 and segments of a million steps."""
    columns = {
        "observation/obs": ArraySpec(frame_shape, "uint8"),
        "action": ArraySpec((1,), "int32"),
        "reward": ArraySpec((), "float32"),
        "terminated": ArraySpec((), "bool"),
        "truncated": ArraySpec((), "bool"),
    }
    leaf = {"array": {"shape": list(frame_shape), "dtype": "uint8"}}
    attributes = {"env": json.dumps({"observation": {"obs": leaf}}), "fraction": 1.0, "config": ""}
    writer_folder = folder / "trajectories" / "inference-0-0"
    writer_folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    frames = (rng.random((EPISODE_STEPS, *frame_shape)) < 0.05).astype(np.uint8) * 200
    ends = np.arange(EPISODE_STEPS) == EPISODE_STEPS - 1
    episode_steps = {
        "observation/obs": frames,
        "action": rng.integers(0, 4, (EPISODE_STEPS, 1), np.int32),
        "reward": rng.random(EPISODE_STEPS, np.float32),
        "terminated": ends,
        "truncated": np.zeros(EPISODE_STEPS, bool),
    }
    pieces = {name: [rows] for name, rows in episode_steps.items()}
    for first in range(0, steps, 1_000_000):
        path = writer_folder / f"seg-{first // 1_000_000:05d}.h5"
        writer = SegmentWriter(path, columns, attributes, "gzip-1")
        for number in range(first // EPISODE_STEPS, min(steps, first + 1_000_000) // EPISODE_STEPS):
            writer.append(pieces, None, entry(number))
        writer.close("followed" if first + 1_000_000 < steps else "finished", {})
    return folder


def entry(number):
    """A line of the episode index."""
    return {
        "return": float(number % 100),
        "env_id": number % 16,
        "episode": number // 16,
        "env_seed": 1,
        "evaluation": False,
        "complete": True,
        "terminated": True,
        "truncated": False,
        "first_policy_version": number,
        "last_policy_version": number,
        "end_unix_s": 1e9 + number,
    }


READ_INDEX = """
import json, sys, time
from pathlib import Path
from analysis.reader import Run
def peak_bytes():  # getrusage would give the peak of the process that started this one
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
before, start = peak_bytes(), time.perf_counter()
count = len(Run(sys.argv[1]).episodes())
print(json.dumps({"episodes": count, "seconds": time.perf_counter() - start,
                  "more_memory_bytes": peak_bytes() - before}))
"""


def index_time(folder, steps):
    """Seconds and memory from nothing to the frame of all episodes, for a tenth of `steps`, too."""
    figures = []
    for size in (steps // 10, steps):
        generate(folder / str(size), size, (4,))
        command = [sys.executable, "-c", READ_INDEX, str(folder / str(size))]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        figures.append({"steps": size, **json.loads(done.stdout)})
    return figures


def random_reads(folder, sequences=300, length=20):
    """Seconds to read random sequences of frames by the reader and by plain h5py."""
    run = Run(generate(folder, 20_000, (84, 84)))
    starts = np.random.default_rng(1).integers(0, 20_000 - length, sequences).tolist()
    column = run.steps("observation/obs")
    path = run.segments[0].path

    def reader():
        for first in starts:
            column[first : first + length]

    def plain():
        with h5py.File(path, "r", locking=False) as file:
            dataset = file["steps/observation/obs"]
            for first in starts:
                dataset[first : first + length]

    seconds: dict[str, list[float]] = {"reader": [], "h5py": []}
    for _ in range(3):
        for name, read in (("reader", reader), ("h5py", plain)):
            begin = time.perf_counter()
            read()
            seconds[name].append(time.perf_counter() - begin)
    best = {name: min(values) for name, values in seconds.items()}
    return {"sequences": sequences, "length": length, **best}


def main():
    """Measure and print; also write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=3, help="of training runs")
    parser.add_argument("--add", action="store_true", help="to the pairs that the file has")
    parser.add_argument("--agent-steps", type=int, default=15_000, help="of each training run")
    parser.add_argument("--steps", type=int, default=10_000_000, help="of the data set")
    parser.add_argument("--quick", action="store_true", help="a small recording to read")
    parser.add_argument("--json", type=Path, help="parts that it has are replaced, others kept")
    options = parser.parse_args()
    steps, sequences = (100_000, 30) if options.quick else (options.steps, 300)
    figures = {}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text(encoding="utf-8"))
    before = figures.get("training") if options.add else None
    parts = {
        "training": lambda folder: training_cost(
            folder, options.pairs, options.agent_steps, before
        ),
        "recorder": recorder_cost,
        "episode_index": lambda folder: index_time(folder, steps),
        "random_reads_s": lambda folder: random_reads(folder, sequences),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts:
            figures[part] = parts[part](Path(scratch) / part)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
