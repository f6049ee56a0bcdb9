"""The link over real MPI ranks."""

from functools import cache

import pytest

from tests.link_bodies import BODIES, a_collective_deadline_names_the_collective
from tests.mpi_runner import run_mpi

pytestmark = pytest.mark.mpi


@cache
def run_bodies(size: int) -> tuple[list[str], str]:
    """Names of the bodies that held on `size` ranks, and what to read where one is missing."""
    result = run_mpi("transport_bodies.py", size, timeout_s=90.0, expect_code=None)
    held = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("held:")]
    return held, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "body", [*BODIES, a_collective_deadline_names_the_collective], ids=lambda body: body.__name__
)
def test_link_rule(body, size):
    held, report = run_bodies(size)
    assert body.__name__ in held, report


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranks_end_cleanly(size):
    _, report = run_bodies(size)
    assert report.startswith("exit code 0"), report
