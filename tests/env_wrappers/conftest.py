from env_wrappers.families import FAMILIES
from tests.env_wrappers.conformance import not_run

# Tests of one family that `make env` doesn't bring: collected where it is installed.
OPTIONAL = {
    "envpool": "test_envpool.py",
    "football": "test_football.py",
    "gymnax": "test_jax.py",
}

collect_ignore = [
    OPTIONAL[family.key]
    for family in FAMILIES
    if family.key in OPTIONAL and family.versions() is None
]


def pytest_terminal_summary(terminalreporter):
    """Say which families could not run."""
    lines = not_run()
    if lines:
        terminalreporter.write_line("environment families that were not run:")
        for line in lines:
            terminalreporter.write_line(f"  {line}")
