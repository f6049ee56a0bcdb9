"""CPU share of a rank that waits for a message, for each waiting policy.

    mpirun -n 2 python benchmarks/waiting.py --json benchmarks/results/waiting.json

Rank 0 stays silent, asleep outside of MPI; rank 1 waits for it with each policy in turn.
Claim: an idle rank under `backoff` uses under 3 % of a core.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from hpcrl.comm.link import Incoming
from hpcrl.comm.transport import MpiLink
from hpcrl.timing import WaitPolicy

POLICIES: tuple[WaitPolicy, ...] = ("backoff", "yield", "spin")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    link = MpiLink(deadline_s=600.0, max_message_bytes=2**30)
    plane = link.plane("control")
    buffer = np.zeros(8, np.uint8)
    if link.rank == 0:
        for _ in POLICIES:
            time.sleep(arguments.seconds)
            sender = plane.sender(1, 0, buffer)
            sender.start()
            while not sender.done():
                time.sleep(1e-3)
        return
    receivers = plane.receivers([Incoming(0, 0, buffer)])
    shares = {}
    for policy in POLICIES:
        link.wait_policy = policy
        waiter = link.waiter(lambda: "rank 1 waited for rank 0")
        receivers.start(0)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        while not receivers.poll():
            waiter.idle()
        used_s, elapsed_s = time.process_time() - start_cpu_s, time.perf_counter() - start_s
        shares[policy] = used_s / elapsed_s
    for policy, share in shares.items():
        print(f"{policy:8} {100 * share:6.2f} % of a core")
    if arguments.json:
        figures = {"ratio": shares["backoff"], "core_share": shares}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
