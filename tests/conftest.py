import pytest


def pytest_itemcollected(item):
    """Give tests that start real ranks to one and the same worker of pytest-xdist."""
    if item.get_closest_marker("mpi"):
        item.add_marker(pytest.mark.xdist_group("mpi"))
