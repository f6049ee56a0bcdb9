"""`hpcrl bench wire`: step messages against a raw mpi4py ping-pong of the same bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hpcrl.bench.ranks import benchmark_script, run_ranks
from hpcrl.bench.result import Chart, Result, Sheet

GOAL = 1.2
GOAL_CASE = (28_224, 8)
"""Bytes of a row and rows: eight stacks of four Atari frames."""

_SIZES = ((64, 1), (1024, 1), (28_224, 1), GOAL_CASE, (2**20, 1), (2**22, 1))
_START_S = 60.0
"""Allowed for a hundred ranks to start; each further one takes its share."""


def bench_wire(
    clients: Sequence[int], seconds: float, rounds: int, wait: str, quick: bool
) -> Result:
    """Measure every size for every number of clients, the goal's case with one client always.

    Args:
      clients: numbers of client ranks.
      seconds: of each way in each round.
      rounds: of which medians are taken.
      wait: waiting policy; auto as in training.
      quick: the goal's case and the smallest only.
    """
    sizes = (_SIZES[0], GOAL_CASE) if quick else _SIZES
    program = [str(benchmark_script("wire_ranks.py"))]
    cases: list[dict[str, Any]] = []
    for count in sorted({1, *clients}):
        # With many clients all else than the messages' number hides in the wait for a core.
        chosen = sizes if count <= 16 else (sizes[0], GOAL_CASE)
        arguments = {
            "cases": chosen,
            "seconds": seconds,
            "rounds": rounds,
            "wait": wait,
            "cores": len(os.sched_getaffinity(0)),
        }
        limit_s = 4 * rounds * len(chosen) * 3 * seconds + _START_S + 3.0 * count
        cases += run_ranks(program, count + 1, arguments, limit_s)["cases"]
    return summarise(cases)


def summarise(cases: Sequence[dict[str, Any]]) -> Result:
    """Return the result; its headline is the goal's case with one client."""
    headline = next(
        case
        for case in cases
        if (case["row_bytes"], case["rows"]) == GOAL_CASE and case["clients"] == 1
    )
    ways = ("hpcrl", "raw")
    columns = ("clients, bytes", *(f"{way} {q}, us" for way in ways for q in ("p10", "p50")))
    rows = [
        (
            f"{case['clients']}, {case['message_bytes']:,}",
            *(case[way][f"{quantile}_us"] for way in ways for quantile in ("p10", "p50")),
            case["ratio"],
            case["hpcrl"]["steps_per_s"],
            case["raw"]["steps_per_s"],
        )
        for case in cases
    ]
    series = {
        f"{name}, {count} clients": [
            (c["message_bytes"], c[name]["p10_us"]) for c in cases if c["clients"] == count
        ]
        for count in sorted({case["clients"] for case in cases})[:3]
        for name in ("hpcrl", "raw")
    }
    copies = headline["ratio_with_copies"]
    return Result(
        "wire",
        headline["ratio"],
        f"round trip of {headline['message_bytes']:,} bytes over raw mpi4py's (goal <= {GOAL}); "
        f"{copies:.3f} with packing at the actor and copying out at the inference rank",
        {"cases": cases, "ratio_with_copies": copies},
        [Sheet("round trips of step messages", (*columns, "ratio", "steps/s", "raw"), rows)],
        [
            Chart("round trip, fastest tenth", "bytes", "microseconds", series, log_x=True),
            Chart(
                "round trip over raw mpi4py",
                "bytes",
                "ratio",
                {
                    "1 client": [
                        (c["message_bytes"], c["ratio"]) for c in cases if c["clients"] == 1
                    ]
                },
                log_x=True,
                goal=GOAL,
            ),
        ],
    )
