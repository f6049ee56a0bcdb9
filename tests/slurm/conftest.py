"""One private cluster for all tests of this folder."""

import getpass

import pytest

from slurm.testcluster import TestCluster


@pytest.fixture(scope="session")
def cluster():
    with TestCluster(num_nodes=3, cpus=4, gpus=2) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean_cluster(cluster):
    """Every test finds all nodes idle, whatever the one before left."""
    yield
    cluster.run("scancel", "--user", getpass.getuser(), check=False)
    cluster.run("scontrol", "update", "nodename=ALL", "state=resume", check=False)
    cluster.wait_idle()
