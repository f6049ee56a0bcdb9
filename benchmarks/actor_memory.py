"""Resident memory of an actor process, with and without its emulators.

    python benchmarks/actor_memory.py --json benchmarks/results/actor_memory.json

Claim: under 150 MB plus its emulators, and no torch in the process.
"""

import argparse
import importlib
import json
import resource
import sys
from pathlib import Path


def resident_mb() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Import what an actor rank imports, start MPI, then build and step emulators."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--envs", type=int, default=32)
    arguments = parser.parse_args()
    import numpy as np

    importlib.import_module("hpcrl.start.launch")
    importlib.import_module("hpcrl.roles.actor")
    from env_wrappers import make
    from hpcrl.comm.transport import MpiLink

    MpiLink(deadline_s=60.0, max_message_bytes=2**30)
    bare_mb = resident_mb()
    seeds = list(range(arguments.envs))
    envs = make("atari:Breakout", arguments.envs, seeds, {})
    envs.reset()
    for _ in range(100):
        envs.step(np.zeros((arguments.envs, 1), np.int32))
    full_mb = resident_mb()
    heavy = sorted({"torch", "horovod", "h5py", "cv2", "matplotlib"} & set(sys.modules))
    figures = {
        "without_emulators_mb": bare_mb,
        "with_emulators_mb": full_mb,
        "emulators": arguments.envs,
        "heavy_imports": heavy,
        "ratio": bare_mb / 150.0,
        "modules": len([m for m in sys.modules if m.startswith("hpcrl")]),
    }
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
