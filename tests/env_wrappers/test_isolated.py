"""Environments in child processes: equal to direct ones, and made anew when they fail."""

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from env_wrappers import EnvError, EnvFailure, IsolatedBatch, Isolation, make
from env_wrappers import pipe_messages as messages
from env_wrappers.child_process import child_environment
from env_wrappers.errors import ActionError
from tests.broken_envs import FAULTS, faults_in

BROKEN = "tests.broken_envs:make"
ROOT = Path(__file__).resolve().parent.parent.parent


def isolated(name, num_envs=2, options=None, clock=time.monotonic, **settings):
    settings = {"step_timeout_s": 20.0, "max_restarts_per_hour": 1000, **settings}
    seeds = range(100, 100 + num_envs)
    return IsolatedBatch(name, num_envs, seeds, options or {}, Isolation(**settings), clock)


def children():
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = {child.pid for child in children()}
    yield
    left = [child for child in children() if child.pid not in before]
    assert not left, left  # a zombie would be among them


def assert_equal(one, other):
    for name in one._fields:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for path, leaf in a.items():
                assert leaf.dtype == b[path].dtype
                np.testing.assert_array_equal(leaf, b[path])
        elif a is None or b is None:
            assert a is b
        else:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gym:CartPole-v1", {}),
        ("synthetic:counting", {"truncate": True, "length_spread": 3, "action_size": 2}),
        ("synthetic:counting", {"observation_shape": [6, 5], "frame_stack": 2}),
        ("tests.env_wrappers.scripted:make_vector", {"mode": "NEXT_STEP"}),
    ],
)
def test_a_child_gives_what_the_environments_give_directly(name, options):
    child, direct = isolated(name, 3, options), make(name, 3, range(100, 103), options)
    assert child.spec == direct.spec
    assert_equal(child.reset(), direct.reset())
    rng = np.random.default_rng(0)
    size = child._memory.action.shape
    for _ in range(60):
        actions = rng.integers(0, 2, size).astype(child._memory.action.dtype)
        assert_equal(child.step(actions), direct.step(actions))
    child.close()
    direct.close()
    assert set(child.failures.values()) == {0}


def test_what_it_gives_is_not_overwritten_by_the_next_step():
    batch = isolated("synthetic:counting")
    first = batch.reset()
    kept = first.observation["obs"].copy()
    batch.step(np.zeros((2, 1), np.int32))
    np.testing.assert_array_equal(first.observation["obs"], kept)
    batch.close()


def play(batch, steps):
    """Step and return all that was given, the reset first."""
    given = [batch.reset()]
    given += [batch.step(np.zeros((batch.num_envs, 1), np.int32)) for _ in range(steps)]
    return given


def check_counting(given, length):
    """Every row follows from the one before it, or was marked as made anew."""
    for before, after in pairwise(given):
        for row in range(len(after.reward)):
            seed, episode, step = before.observation["obs"][row]
            observation, reward = after.observation["obs"][row].tolist(), after.reward[row]
            if after.restarted[row]:
                assert observation[1:] == [0, 0]
                assert reward == 0
                assert not any(
                    flag[row] for flag in (after.terminated, after.truncated, after.ended)
                )
                continue
            assert reward == step + 1
            ended = step + 1 == length
            assert after.ended[row] == ended
            assert observation == [seed, *((episode + 1, 0) if ended else (episode, step + 1))]


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_counted_and_leaves_no_bogus_step(tmp_path, fault, truncate):
    log = tmp_path / "faults"
    options = {"faults": [fault], "mean_steps": 20, "log": str(log), "truncate": truncate}
    timeout_s = 1.0 if fault == "hang" else 20.0
    batch = isolated(BROKEN, 2, options, step_timeout_s=timeout_s)
    pids, given = set(), [batch.reset()]
    while sum(batch.failures.values()) < 3:
        pids.add(batch._child.pid)
        given.append(batch.step(np.zeros((2, 1), np.int32)))
    batch.close()
    assert (
        batch.failures == faults_in(log) == {**dict.fromkeys(batch.failures, 0), FAULTS[fault]: 3}
    )
    assert sum(step.restarted.all() for step in given) == 3
    check_counting(given, 7)
    seeds = [step.observation["obs"][:, 0].tolist() for step in given]
    assert len({seed for row in seeds for seed in row}) == 2 * 4, "a seed was used again"
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_restarts_within_an_hour_are_limited_and_the_last_error_is_told(tmp_path):
    now_s = [0.0]
    options = {"faults": ["raise"], "mean_steps": 5, "log": str(tmp_path / "faults")}
    batch = isolated(BROKEN, 1, options, lambda: now_s[0], max_restarts_per_hour=2)
    batch.reset()
    zero = np.zeros((1, 1), np.int32)
    for count in (1, 2):
        while sum(batch.failures.values()) < count:
            batch.step(zero)
    now_s[0] = 3601.0  # both are forgotten
    for count in (3, 4):
        while sum(batch.failures.values()) < count:
            batch.step(zero)
    with pytest.raises(EnvFailure, match=r"failed 3 times within an hour.*_per_hour is 2") as error:
        play(batch, 100)
    assert "5 raised since the start" in str(error.value)
    assert "ValueError: this environment broke on purpose" in str(error.value)
    assert "broken_envs.py" in str(error.value)


def test_an_action_that_does_not_exist_is_not_the_environments_failure():
    batch = isolated("gym:CartPole-v1")
    batch.reset()
    with pytest.raises(ActionError, match="expected a category from 0 to 1, got 7"):
        batch.step(np.array([[0], [7]], np.int32))
    with pytest.raises(ActionError, match="shape"):
        batch.step(np.zeros((1, 1), np.int32))
    assert set(batch.failures.values()) == {0}
    batch.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gym:CartPoll-v1", {}, "did you mean 'CartPole-v1'"),
        ("gym:CartPole-v1", {"frame_stak": 2}, "has no option 'frame_stak'"),
        ("tests.env_wrappers.bad_makers:raises", {}, "RuntimeError: no licence"),
        ("tests.env_wrappers.bad_makers:exits", {}, "left with exit code 9"),
        ("tests.env_wrappers.bad_makers:crashes", {}, "ended by SIGSEGV"),
        ("tests.env_wrappers.bad_makers:sleeps", {}, "no answer for 3 s"),
    ],
)
def test_what_cannot_be_made_is_told(name, options, message):
    with pytest.raises(EnvError, match=message):
        isolated(name, options=options, start_timeout_s=3.0 if "sleeps" in name else 60.0)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", "can't be started: No such file or directory"),
        (__file__, "can't be started: Permission denied"),
        ("/bin/false", "left with exit code 1"),
    ],
)
def test_an_interpreter_that_is_none_is_told(python, message):
    with pytest.raises(EnvError, match=message):
        isolated("gym:CartPole-v1", python=python)


def test_a_node_that_cannot_start_a_process_for_a_while_is_waited_for(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    envs = isolated("gym:CartPole-v1", python=str(python))
    envs.reset()
    python.chmod(0o644)
    back = threading.Timer(1.5, python.chmod, (0o755,))
    back.start()
    for child in children():
        child.kill()
    assert envs.step(np.zeros((2, 1), np.int32)).restarted.all()
    back.join()
    # Its end, and starts at once and a second later.
    assert envs.failures == {"raised": 0, "garbage": 0, "hung": 0, "died": 3}
    envs.close()


@pytest.mark.parametrize("broken", ["import sys\nsys.version_info = (3, 8, 1)\n", ""])
def test_an_interpreter_that_lacks_what_is_needed_says_so(tmp_path, broken):
    """A Python that claims to be old, and one without packages."""
    (tmp_path / "sitecustomize.py").write_text(broken)
    python = tmp_path / "python"
    flags = "" if broken else "-S "
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} {flags}"$@"\n')
    python.chmod(0o755)
    message = "must be 3.10 or newer" if broken else "install numpy and gymnasium there"
    with pytest.raises(EnvError, match=message):
        isolated("gym:CartPole-v1", python=str(python))


def test_another_interpreter_needs_nothing_of_hpcrl(tmp_path):
    """One in an environment of its own, which has only what this project's packages bring."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "own")], check=True
    )
    site = next((tmp_path / "own" / "lib").glob("python*/site-packages"))
    for package in ("numpy", "gymnasium", "cloudpickle", "farama_notifications"):
        found = Path(__import__(package).__file__).parent
        (site / package).symlink_to(found)
        for libs in found.parent.glob(f"{package}.libs"):
            (site / libs.name).symlink_to(libs)
    (site / "typing_extensions.py").symlink_to(__import__("typing_extensions").__file__)
    (tmp_path / "what.py").write_text(
        "import sys, gymnasium\n"
        "def make():\n"
        "    assert 'own' in sys.prefix, sys.prefix\n"
        "    try:\n"
        "        import torch\n"
        "    except ImportError:\n"
        "        return gymnasium.make('CartPole-v1')\n"
    )
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        batch = isolated("what:make", python=str(tmp_path / "own" / "bin" / "python"))
    finally:
        del os.environ["PYTHONPATH"]
    assert len(play(batch, 30)) == 31
    batch.close()
    assert set(batch.failures.values()) == {0}


def test_a_child_never_thinks_that_it_is_a_rank():
    names = (
        "OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK PMI2_X SLURM_PROCID MPI_LOCALRANKID MPICH_X "
        "PALS_RANKID PRTE_X HPCRL_WORLD_SIZE"
    )
    launched = dict.fromkeys(names.split(), "1")
    own = {"HOME": "/root", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "PYTHONHOME": "/x"}
    assert child_environment({**launched, **own}, foreign=False) == own
    assert "PYTHONHOME" not in child_environment(own, foreign=True)


OWNER = """
import sys, threading, time
from env_wrappers import IsolatedBatch, Isolation
def make():
    global batch
    batch = IsolatedBatch("tests.env_wrappers.bad_makers:family", 1, [0], {}, Isolation())
if sys.argv[1] == "threads":
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
else:
    make()
batch.reset()
import psutil
print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
if sys.argv[1] == "hang":
    import numpy as np
    batch.step(np.zeros((1, 1), np.int32))
time.sleep(1000)
"""


@pytest.mark.parametrize("doing", ["idle", "hang", "threads"])
def test_children_and_what_they_started_die_with_a_process_that_is_killed(doing):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, doing], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2, "the child and what it started"
    if doing == "hang":
        time.sleep(0.3)
    assert all(lives(pid) for pid in pids), "they outlive the thread that made them"
    owner.kill()
    owner.wait()
    wait_for_end(pids)


@pytest.mark.parametrize("end", ["_commands", "_answers"])
def test_a_child_that_nobody_asks_or_hears_takes_along_what_it_started(end):
    batch = IsolatedBatch("tests.env_wrappers.bad_makers:family", 1, [0], {}, Isolation())
    batch.reset()
    child = batch._child
    pids = [child.pid, *(p.pid for p in psutil.Process(child.pid).children(recursive=True))]
    assert len(pids) == 2
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), getattr(child, end))
    if end == "_answers":
        child.send(messages.RESET)
    wait_for_end(pids)
    batch.close()


def wait_for_end(pids):
    end_s = time.monotonic() + 10.0
    while any(lives(pid) for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(lives(pid) for pid in pids)


def lives(pid):
    """Whether it runs: one that nobody of ours has to reap doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
