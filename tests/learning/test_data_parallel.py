"""Sums over learners: every backend trains as one big batch would, and drift is found."""

import hashlib
import importlib.util
import json
import os
import sys
from functools import cache
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from hpcrl.comm.loopback import World
from hpcrl.learning import data_parallel
from hpcrl.learning.data_parallel import (
    DataParallelError,
    DriftError,
    MpiDataParallel,
    check_in_sync,
    make_data_parallel,
    parameters_checksum,
)
from tests.loopback_runner import run_loopback
from tests.mpi_runner import run_mpi
from tests.oracles.big_batch import big_batch_parameters

CPU = torch.device("cpu")
# Horovod is optional, so that an environment in which it can't be built passes its tests.
HOROVOD = ["horovod"] if importlib.util.find_spec("horovod") else []
BACKENDS = [*HOROVOD, "torch", "mpi", "auto"]


@cache
def trained(learners: int) -> dict[str, dict]:
    """Name and parameters by configured backend; the script compares with the big batch."""
    result = run_mpi("data_parallel_parity.py", learners + 1, BACKENDS, timeout_s=110.0)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return dict(zip(BACKENDS, lines, strict=True))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learners", [1, 2, 4])
def test_learners_train_as_one_big_batch_and_other_ranks_load_nothing(backend, learners):
    parameters = torch.tensor(trained(learners)[backend]["parameters"])
    torch.testing.assert_close(parameters, big_batch_parameters(10), rtol=1e-4, atol=1e-5)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("learners", [1, 2, 4])
def test_backends_agree_to_float_tolerance(learners):
    runs = trained(learners)
    for backend in BACKENDS[1:]:
        np.testing.assert_allclose(
            runs[backend]["parameters"], runs[BACKENDS[0]]["parameters"], rtol=1e-4, atol=1e-6
        )


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("learners", "auto"), [(1, "single"), (2, [*HOROVOD, "mpi"][0])])
def test_the_backend_in_use_is_named(learners, auto):
    names = {backend: run["name"] for backend, run in trained(learners).items()}
    assert names == {**{backend: backend for backend in BACKENDS}, "auto": auto}


@pytest.mark.mpi
def test_a_missing_learner_is_named_by_the_deadline_of_every_backend():
    backends = [b for b in BACKENDS if b != "auto"]
    result = run_mpi("data_parallel_missing.py", 2, backends)
    ended = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    what = {
        "horovod": "Horovod's sum.1000",
        "torch": "torch.distributed's sum of 1000 values",
        "mpi": "an all-reduce (sum) of 1000 values",
    }
    assert ended.keys() == set(backends)
    for backend, message in ended.items():
        assert message.startswith(f"rank 0 (rank 0) waited in {what[backend]}: nothing for 0.")


@pytest.mark.mpi
def test_without_thread_level_multiple_auto_takes_mpi_and_horovod_refuses():
    result = run_mpi("data_parallel_refusal.py", 2, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    reason = "does not give thread level MULTIPLE" if HOROVOD else "can't be imported"
    assert result.stdout.startswith("mpi | learner.backend horovod: ")
    assert reason in result.stdout
    assert "(learners [0, 1]); use learner.backend auto, torch or mpi" in result.stdout


def without_horovod(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)


def stub_horovod(monkeypatch, **functions):
    package = SimpleNamespace(torch=SimpleNamespace(**functions))
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", package.torch)


def test_a_missing_horovod_is_explained(monkeypatch):
    without_horovod(monkeypatch)
    with pytest.raises(DataParallelError, match=r"make horovod.*use learner.backend auto, torch"):
        make_data_parallel("horovod", World(1).link(0).group([0]), CPU, ["a"])


def test_a_horovod_without_mpi_is_explained(monkeypatch):
    stub_horovod(monkeypatch, mpi_built=lambda: False)
    with pytest.raises(DataParallelError, match="built without MPI"):
        make_data_parallel("horovod", World(1).link(0).group([0]), CPU, ["a"])


def test_horovod_needs_ranks(monkeypatch):
    stub_horovod(monkeypatch, mpi_built=lambda: True)
    with pytest.raises(DataParallelError, match="MPI ranks, not threads"):
        make_data_parallel("horovod", World(1).link(0).group([0]), CPU, ["a"])


def test_one_learner_without_horovod_makes_all_take_mpi(monkeypatch):
    obstacles = [None, "it can't be imported here", None]
    monkeypatch.setattr(data_parallel, "horovod_obstacle", lambda group: obstacles[group.rank])

    def body(link):
        group = link.group([0, 1, 2])
        with pytest.raises(DataParallelError, match=r"\(learners \[1\]\)"):
            make_data_parallel("horovod", group, CPU, ["a"] * 3)
        return make_data_parallel("auto", group, CPU, ["a"] * 3).name

    assert run_loopback(body, 3) == ["mpi"] * 3


def test_torch_on_several_hosts_needs_a_shared_directory():
    class Ranks:
        size, rank, communicator = 2, 0, object()

    with pytest.raises(DataParallelError, match=r"\['a', 'b'\] need a directory that all hosts"):
        make_data_parallel("torch", Ranks(), CPU, ["a", "b"])


def test_torch_refuses_learners_in_one_process():
    with pytest.raises(DataParallelError, match="share one process"):
        run_loopback(
            lambda link: make_data_parallel("torch", link.group([0, 1]), CPU, ["a", "a"]), 2
        )


def listening():
    """Addresses and ports on which this process listens; an MPI of earlier tests may, too."""
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def torch_learner(tmp_path, monkeypatch):
    """One learner on gloo, whose temporary files go to `tmp_path`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that monkeypatch takes it back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return make_data_parallel("torch", World(1).link(0).group([0]), CPU, ["a"])


def test_torch_meets_in_a_private_file_and_removes_it(torch_learner, tmp_path):
    (meeting_dir,) = tmp_path.iterdir()
    assert meeting_dir.stat().st_mode & 0o077 == 0
    torch_learner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def listening_before():
    return listening()


def test_torch_on_one_host_listens_on_the_loopback_interface_only(listening_before, torch_learner):
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    addresses = {address for address, _ in listening() - listening_before}
    assert addresses <= {"127.0.0.1", "::1"}
    assert addresses
    torch_learner.close()


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=["in place", "staged"])
@pytest.mark.parametrize("part_elements", [1, 3, 10, 2**28])
def test_the_mpi_sum_covers_every_part(part_elements, device):
    def body(link):
        parallel = MpiDataParallel(link.group([0, 1, 2]), device, part_elements)
        flat = torch.arange(10, dtype=torch.float32) * 10.0**link.rank
        address = flat.data_ptr()
        parallel.sum_(flat)
        assert flat.data_ptr() == address
        return flat.tolist()

    # 1 + 10 + 100 times 0..9: integers, so exact in float32.
    assert run_loopback(body, 3) == [[111.0 * n for n in range(10)]] * 3


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=["in place", "staged"])
def test_the_mpi_broadcast_gives_all_the_roots_tensor(device):
    def body(link):
        parallel = MpiDataParallel(link.group([0, 1, 2]), device)
        flat = torch.tensor([link.rank + 0.5, float("nan"), -0.0])
        parallel.broadcast_(flat, root=2)
        return flat.numpy().tobytes()

    assert run_loopback(body, 3) == [np.array([2.5, np.nan, -0.0], np.float32).tobytes()] * 3


def test_a_tensor_that_needs_gradients_is_summed_in_place():
    flat = torch.ones(4, requires_grad=True)
    parallel = MpiDataParallel(World(1).link(0).group([0]), CPU)
    parallel.sum_(flat)
    assert flat.tolist() == [1.0] * 4


@pytest.mark.parametrize("make", [lambda group: MpiDataParallel(group, CPU), None])
@pytest.mark.parametrize(
    ("flat", "error", "match"),
    [
        (torch.zeros(3, dtype=torch.float64), TypeError, "expected dtype torch.float32"),
        (torch.zeros(3, 2), ValueError, r"expected shape \[\*\], got \[3, 2\]"),
        (torch.zeros(6)[::2], ValueError, "contiguous"),
    ],
    ids=["float64", "two axes", "strided"],
)
def test_other_tensors_are_refused(make, flat, error, match):
    group = World(1).link(0).group([0])
    parallel = make(group) if make else make_data_parallel("auto", group, CPU, ["a"])
    with pytest.raises(error, match=match):
        parallel.sum_(flat)
    with pytest.raises(error, match=match):
        parallel.broadcast_(flat)


def test_a_single_learner_sums_nothing():
    parallel = make_data_parallel("auto", World(1).link(0).group([0]), CPU, ["a"])
    assert (parallel.name, parallel.size, parallel.rank) == ("single", 1, 0)
    flat = torch.tensor([1.0, 2.0])
    parallel.sum_(flat)
    parallel.broadcast_(flat)
    parallel.close()
    assert flat.tolist() == [1.0, 2.0]


def test_the_checksum_is_that_of_the_bytes():
    flat = torch.tensor([1.0, -2.5, 3e-38])
    digest = hashlib.blake2b(np.array([1.0, -2.5, 3e-38], np.float32).tobytes(), digest_size=8)
    assert parameters_checksum(flat) == int.from_bytes(digest.digest(), "little")
    assert parameters_checksum(flat.requires_grad_()) == parameters_checksum(flat)


@pytest.mark.parametrize("place", [0, 500, 999])
def test_the_checksum_sees_the_smallest_change(place):
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    other = flat.clone()
    other[place] = torch.nextafter(other[place], torch.tensor(torch.inf))
    swapped = flat.clone()
    swapped[place], swapped[place - 1] = flat[place - 1], flat[place]
    sums = {int(parameters_checksum(tensor)) for tensor in (flat, other, swapped)}
    assert len(sums) == 3
    assert parameters_checksum(torch.zeros(3)) != parameters_checksum(-torch.zeros(3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 1, 2, 1], r"learner step 300 .* learners \[2\] differ from learner 0's"),
        ([2, 1, 1, 1], r"learners \[0\] differ from learner 1's"),
        ([1, 1, 2, 2], r"learners \[2, 3\] differ from learner 0's"),
        ([1, 2, 3, 2], r"learners \[0, 2\] differ from learner 1's"),
    ],
)
def test_every_learner_learns_who_drifted(values, message):
    def body(link):
        with pytest.raises(DriftError, match=message):
            check_in_sync(link.group(range(4)), torch.full((7,), float(values[link.rank])), 300)
        return "raised"

    assert run_loopback(body, 4) == ["raised"] * 4


def test_equal_parameters_are_in_sync():
    run_loopback(lambda link: check_in_sync(link.group(range(4)), torch.ones(7), 300), 4)
