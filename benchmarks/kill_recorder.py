"""SIGKILL the rank that writes trajectories at random times of a training run; read what is left.

    python benchmarks/kill_recorder.py --kills 20 --json benchmarks/results/kill_recorder.json

Kills are added to those that the file already has: on a busy machine do a few at a time, each with
another --seed.

One run of Breakout is started and resumed again and again; its recording rank is killed each time,
while another process reads what is being written. Claim: all closed segments are whole and never
change, an open one gives at least all that a reader saw flushed, readers never crash, and every
selected episode between the first and the last of an environment is there or counted as absent.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from analysis.errors import DataError
from analysis.missing import missing_episodes
from analysis.reader import Run
from analysis.segments import Segment, find_segments, load_segment

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "breakout_demo.yaml"
START_S = 180.0


def start(run: Path) -> subprocess.Popen:
    """Start or resume the job; segments are closed every few seconds."""
    command = [sys.executable, "-m", "hpcrl", "train", str(CONFIG), "--run.dir", str(run)]
    command += ["--resume", "auto", "--stop.wall_time_s", "0", "--stop.agent_steps", "100000000"]
    command += ["--recording.enabled", "true", "--recording.segment_s", "4"]
    command += ["--checkpoint.every_s", "5", "--metrics.tensorboard", "false"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def writing_rank(job: subprocess.Popen, run: Path) -> psutil.Process:
    """The process of the inference rank, by what mpirun told it."""
    topology = json.loads((run / "topology.json").read_text())
    (rank,) = [r["rank"] for r in topology["ranks"] if r["role"] == "inference"]
    for process in psutil.Process(job.pid).children(recursive=True):
        if process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
            return process
    raise RuntimeError(f"rank {rank} is not among the processes of {job.pid}")


def newest_writer(run: Path) -> Path | None:
    """The folder of the last start that has begun a segment."""
    paths = find_segments(run / "trajectories")
    return max(
        (path.parent for path in paths), key=lambda f: int(f.name.split("-")[-1]), default=None
    )


def flushed(folder: Path) -> dict[int, tuple[int, int]]:
    """Whole episodes and flushed steps of every segment of a writer, as a reader sees them now."""
    seen = {}
    for path in sorted(folder.glob("seg-*.h5*")):
        segment = load_segment(path)
        steps = segment.num_steps + segment.unindexed_steps
        seen[segment.number] = (len(segment.index["start"]), steps)
    return seen


def wait_for_writer(job: subprocess.Popen, run: Path, old: Path | None) -> Path:
    """The folder of this start's writer, once it has a segment."""
    deadline = time.monotonic() + START_S
    while (folder := newest_writer(run)) in (None, old):
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job wrote no segment (code {job.poll()})")
        time.sleep(0.1)
    return folder


def kill_once(run: Path, old: Path | None, delay_s: float) -> tuple[Path, dict, int]:
    """One start, ended by a kill; return the writer's folder and what was last seen of it."""
    job = start(run)
    try:
        folder = wait_for_writer(job, run, old)
        victim, reads = writing_rank(job, run), 0
        deadline = time.monotonic() + delay_s
        seen = flushed(folder)
        while time.monotonic() < deadline:
            seen, reads = flushed(folder), reads + 1
        victim.send_signal(signal.SIGKILL)
        job.wait(timeout=120)
    finally:
        if job.poll() is None:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
    return folder, seen, reads


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_whole(segment: Segment) -> None:
    """Read every step; a damaged chunk raises."""
    for column in segment.columns:
        for first in range(0, segment.num_steps, 4096):
            segment.read(column, first, min(first + 4096, segment.num_steps))
    segment.close()


def gaps(segments: list[Segment]) -> int:
    """Episodes that are absent between the first and last of an environment, counted naively."""
    absent = 0
    for env_id in {int(i) for segment in segments for i in segment.index["env_id"]}:
        numbers = [
            int(number)
            for segment in segments
            for i, number in zip(segment.index["env_id"], segment.index["episode"], strict=True)
            if i == env_id
        ]
        absent += max(numbers) + 1 - len(set(numbers))
        assert len(numbers) == len(set(numbers)), f"an episode of {env_id} is there twice"
    return absent


def check(folder: Path, seen: dict) -> dict:
    """What one kill left; raises where a claim doesn't hold."""
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    segments = [load_segment(path) for path in paths]
    for segment in segments:
        read_whole(segment)
    closed = [segment for segment in segments if segment.finished]
    opened = [segment for segment in segments if not segment.finished]
    assert [segment.number for segment in segments] == list(range(len(segments)))
    assert all(segment.end == "followed" for segment in closed)
    for segment in segments:
        episodes, steps = seen.get(segment.number, (0, 0))
        assert len(segment.index["start"]) >= episodes, f"{segment.path}: fewer episodes than seen"
        assert segment.num_steps + segment.unindexed_steps >= steps, f"{segment.path}: fewer steps"
    absent = gaps(segments)
    assert absent == missing_episodes(segments)
    return {
        "closed_segments": len(closed),
        "open_segments": len(opened),
        "episodes": sum(len(segment.index["start"]) for segment in segments),
        "episodes_of_open_segment": sum(len(segment.index["start"]) for segment in opened),
        "flushed_steps_of_later_episodes": sum(segment.unindexed_steps for segment in opened),
        "absent_episodes": absent,
    }


def report_of(run: Path) -> dict:
    """What users see: refusal by default, all that is readable with `--partial`."""
    try:
        Run(run).episodes()
        refused = ""
    except DataError as error:
        refused = str(error).splitlines()[0].replace(str(run), "RUN")
    partial = Run(run, partial=True)
    command = [sys.executable, "-m", "analysis.episodes", str(run), "--partial"]
    command += ["-o", str(run.with_name("episodes.csv"))]
    script = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert script.returncode == 0, script.stderr
    assert script.stderr.count("killed") >= 1
    return {
        "without_partial": refused,
        "episodes": len(partial.episodes()),
        "notes": len(partial.notes),
    }


def main() -> int:
    """Kill, read, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    kills, folder = [], None
    digests: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        try:
            for _ in range(arguments.kills):
                delay_s = rng.uniform(0.0, 12.0)
                folder, seen, reads = kill_once(run, folder, delay_s)
                line = {"after_s": round(delay_s, 2), "reads_meanwhile": reads}
                kills.append(line | check(folder, seen))
                digests |= {p: digest(p) for p in sorted(folder.glob("seg-*.h5"))}
                print(kills[-1], flush=True)
        except KeyboardInterrupt:
            print(f"interrupted after {len(kills)} kills", flush=True)
        changed = [str(path) for path, before in digests.items() if digest(path) != before]
        figures = {"closed_segments_changed": len(changed), **report_of(run)}
    figures = added(kills, figures, arguments.json)
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["ratio"] == 1.0 else 1


def added(kills: list[dict], run: dict, path: Path | None) -> dict:
    """All kills of the file at `path` and these, and what was seen of each run."""
    figures: dict = {"kills": [], "runs": []}
    if path and path.exists():
        figures = json.loads(path.read_text(encoding="utf-8"))
    figures["kills"] += kills
    figures["runs"].append(run)
    figures["number_of_kills"] = len(figures["kills"])
    figures["ratio"] = float(not any(run["closed_segments_changed"] for run in figures["runs"]))
    return figures


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    sys.exit(main())
