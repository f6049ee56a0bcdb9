"""What the three changes that made a learner step and acting fastest gained, by turns in one run.

    python -m benchmarks.gains --json benchmarks/results/gains.json

before: the plain way. Images are converted to float32 and scaled, then convolved as they come;
malloc returns large blocks to the system after every step; a stack of frames is moved on by one at
every step. after: what hpcrl does. Processor time, so that other work on the machine counts little.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from hpcrl.bench.costs import environment_ms, training_call
from hpcrl.config.load import load_config
from hpcrl.nets import torso
from hpcrl.node.torch_device import keep_freed_memory
from hpcrl.ops.frame_stack import FrameStacker

CONFIG = "configs/breakout_vtrace.yaml"
TURNS = 5
ROWS, STACK, FRAME = 64, 4, (84, 84)


def plain_images(layer, image):
    """The first convolution's `forward` as one would write it."""
    return layer._conv_forward(image.float() * layer._scale, layer.weight, layer.bias)


class MovedStacks:
    """Stacks that move on by one frame."""

    def __init__(self):
        self._stacks = np.zeros((ROWS, STACK, *FRAME), np.uint8)

    def push(self, rows, frames, start):
        stacks = self._stacks[rows]
        stacks[start] = 0
        stacks[:, :-1] = stacks[:, 1:]
        stacks[:, -1] = frames
        self._stacks[rows] = stacks
        return stacks


def cpu_ms(call: Callable[[], object], count: int) -> float:
    """Median processor time of a call."""
    call()
    times = []
    for _ in range(count):
        begin_s = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - begin_s))
    return statistics.median(times)


def learner_step() -> Callable[[], object]:
    """A learner step of the configuration."""
    torch.set_num_threads(1)
    config = load_config(CONFIG, [])
    spec, _ = environment_ms(config, 0.1)
    return training_call(config, spec, 1)


def images() -> tuple[float, float]:
    """A learner step with the plain first layer, and as it is."""
    keep_freed_memory()
    step = learner_step()
    with mock.patch.object(torso.ImageConv2d, "forward", plain_images):
        before = cpu_ms(step, 3)
    return before, cpu_ms(step, 3)


def memory() -> tuple[float, float]:
    """A learner step before and after malloc is told to keep what is freed."""
    step = learner_step()
    before = cpu_ms(step, 3)
    keep_freed_memory()
    return before, cpu_ms(step, 3)


def stacks() -> tuple[float, float]:
    """A stack of four frames for a batch of 64 rows."""
    frames = np.random.default_rng(0).integers(0, 256, (ROWS, *FRAME), np.uint8)
    rows, start = np.arange(ROWS), np.zeros(ROWS, bool)
    moved, ring = MovedStacks(), FrameStacker(ROWS, STACK, FRAME, np.uint8)
    before = cpu_ms(lambda: moved.push(rows, frames, start), 200)
    return before, cpu_ms(lambda: ring.push(rows, frames, start), 200)


GAINS = {"images": images, "memory": memory, "stacks": stacks}


def measure(name: str) -> dict:
    """Take turns, each in a process of its own, as malloc's settings can't be taken back."""
    program = [sys.executable, "-m", "benchmarks.gains", "--turn", name]
    turns = [
        json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
        for _ in range(TURNS)
    ]
    before, after = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(b / a for b, a in turns)
    return {
        "what": GAINS[name].__doc__,
        "before_cpu_ms": round(before, 3),
        "after_cpu_ms": round(after, 3),
        "before_over_after": round(ratio, 2),
    }


def main() -> None:
    """Measure all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turn", choices=GAINS)
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(GAINS[arguments.turn]()))
        return
    figures = {name: measure(name) for name in GAINS}
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
