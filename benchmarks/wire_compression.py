"""What compression makes of each family's step messages, and on which networks it pays.

    python -m benchmarks.wire_compression --json benchmarks/results/wire_compression.json

Plays 32 environments at random and compresses what an actor would send. It pays on a network slower
than `pays_below_mb_per_s` to each inference rank: the bytes saved over the processor time of both
ends.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

import env_wrappers
from env_wrappers.families import FAMILIES
from hpcrl.comm.wire import step_layout, step_short_nbytes
from hpcrl.compression import available_codecs, make_codec
from hpcrl.job import ACTOR_STAGES
from hpcrl.specs import EnvSpec
from hpcrl.start.environments import random_actions

ROWS, STEPS = 32, 60


def messages_of(family):
    """What an actor sends in the first steps, without final observations."""
    rows = ROWS * family.rows_per_env
    target, options = f"{family.name}:{family.example}", dict(family.example_options)
    batch = env_wrappers.make(target, rows, range(rows), options)
    spec = EnvSpec.from_json(batch.spec)
    layout = step_layout(spec, rows, len(ACTOR_STAGES))
    buffer, nbytes = layout.buffer(), step_short_nbytes(spec, layout)
    views = layout.views(buffer)
    rng, step, found = np.random.default_rng(0), batch.reset(), []
    for number in range(STEPS):
        views["sequence"][...] = number
        for name, column in step._asdict().items():
            if name in views:
                views[name][:] = column
        for path, leaf in step.observation.items():
            views[f"obs:{path}"][:] = leaf
        found.append(buffer[:nbytes].copy())
        step = batch.step(random_actions(spec.action, rows, rng))
    batch.close()
    return rows, found


def measure(messages, rows, codec):
    """Bytes per step and microseconds per step of both ends."""
    nbytes, begin_s = 0, time.process_time()
    for message in messages:
        packed = codec.compress(message.data)
        nbytes += len(packed)
        codec.decompress(packed)
    spent_s = time.process_time() - begin_s
    steps = rows * len(messages)
    saved = sum(len(message) for message in messages) - nbytes
    return {
        "bytes_per_step": round(nbytes / steps),
        "us_per_step": round(1e6 * spent_s / steps, 2),
        "pays_below_mb_per_s": round(1e-6 * saved / spent_s),
    }


def main() -> None:
    """Measure the families that are installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", help="families; all installed ones if absent")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {}
    for family in FAMILIES:
        if options.keys and family.key not in options.keys:
            continue
        if not family.example or family.versions() is None or family.key == "synthetic":
            continue
        rows, messages = messages_of(family)
        plain = len(messages[0])
        figures[family.key] = {"environment": f"{family.name}:{family.example}"}
        figures[family.key]["bytes_per_step"] = round(plain / rows)
        for name in available_codecs()[1:]:
            figures[family.key][name] = measure(messages, rows, make_codec(name))
        print(family.key, json.dumps(figures[family.key]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
