"""Ranks of `hpcrl bench learner`: each gradient backend against the MPI library's own Allreduce.

All ranks are learners. The backends take turns within a round; a round's time is the slowest
rank's.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from hpcrl.bench.ranks import read_arguments, write_result
from hpcrl.comm.transport import MpiLink
from hpcrl.learning.data_parallel import DataParallelError, make_data_parallel
from hpcrl.timing import choose_wait_policy


def main() -> None:
    """Measure every backend that works here at every size."""
    arguments = read_arguments()
    link = MpiLink(deadline_s=120.0, max_message_bytes=2**30)
    link.wait_policy = choose_wait_policy("auto", link.size, arguments["cores"])
    torch.set_num_threads(1)
    group = link.group(range(link.size))
    comm = group.communicator
    backends = {}
    for name in arguments["backends"]:
        try:
            backends[name] = make_data_parallel(
                name,
                group,
                torch.device("cpu"),
                ["one host"] * link.size,
                shared_dir=Path(tempfile.gettempdir()),
            )
        except DataParallelError as error:
            if link.rank == 0:
                print(f"left out: {error}")
    cases = []
    for size in arguments["sizes"]:
        flat = torch.ones(size)
        array = flat.numpy()
        calls = {
            "mpi_library": lambda array=array: comm.Allreduce(MPI.IN_PLACE, array),
            **{n: lambda b=b, flat=flat: b.sum_(flat) for n, b in backends.items()},
        }
        times: dict[str, list] = {name: [] for name in calls}
        for _ in range(arguments["rounds"]):
            for name, call in calls.items():
                flat.fill_(1.0)
                comm.Barrier()
                start_s = time.perf_counter()
                call()
                own = np.array([time.perf_counter() - start_s])
                comm.Allreduce(MPI.IN_PLACE, own, MPI.MAX)
                times[name].append(float(own[0]))
                if not torch.equal(flat, torch.full_like(flat, float(link.size))):
                    raise SystemExit(f"{name} gave a wrong sum")
        cases.append(
            {
                "values": size,
                "learners": link.size,
                "ms": {n: 1e3 * float(np.median(t)) for n, t in times.items()},
                "fastest_tenth_ms": {n: 1e3 * float(np.quantile(t, 0.1)) for n, t in times.items()},
            }
        )
    for backend in backends.values():
        backend.close()
    if link.rank == 0:
        write_result(arguments, {"cases": cases})


if __name__ == "__main__":
    main()
