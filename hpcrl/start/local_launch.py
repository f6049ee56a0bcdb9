"""`hpcrl train` without a launcher starts its own mpirun, and speaks for it to the user."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hpcrl import exit_codes
from hpcrl.node.slurm_env import LaunchError

_POLL_S = 0.5
_LOOK_S = 0.05
_LINGER_S = 15.0
"""How long mpirun may live on without a rank: in fault-tolerant mode it now and then never ends."""
_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = "/dev/shm"
_BACKING = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
_DOCUMENTED = (
    exit_codes.DONE,
    exit_codes.USAGE,
    exit_codes.INTERNAL,
    exit_codes.LAUNCH,
    exit_codes.ENVIRONMENTS,
    exit_codes.STORAGE,
    exit_codes.REQUEUE,
)


def find_mpirun() -> str:
    """Return the mpirun beside this Python (the wheel's), else the one on PATH.

    Raises:
      LaunchError: there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            f"no mpirun beside {sys.executable} and none on PATH: run `make env`, or start hpcrl "
            "with your site's launcher (srun, mpirun)"
        )
    return found


def mpirun_command(
    mpirun: str,
    ranks: int,
    arguments: Sequence[str],
    program: Sequence[str] = ("-m", "hpcrl"),
    fault_tolerant: bool = False,
) -> list[str]:
    """Return the command line that runs `hpcrl ARGUMENTS` on `ranks` local ranks.

    `program` is another Python program to run in place of hpcrl: a script, or -m and a module.

    More ranks than cores are allowed and none is bound: how ranks wait is hpcrl's business.
    `fault_tolerant` asks Open MPI 5 or newer to let the others live when a rank dies.
    """
    text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in text else []
    options += ["--with-ft", "ulfm"] if fault_tolerant else []
    python = [sys.executable, "-u", "-m", "mpi4py"]
    return [mpirun, "-n", str(ranks), *options, *python, *program, *arguments]


def launch_environment(ranks: int) -> dict[str, str]:
    """Return the environment for mpirun: told the world size and whether a terminal is seen."""
    environment = dict(os.environ)
    environment["HPCRL_WORLD_SIZE"] = str(ranks)
    environment["HPCRL_TTY"] = "1" if sys.stdout.isatty() else "0"
    # Two numeric libraries that each start a thread per core would slow every rank's start.
    environment.setdefault("OMP_NUM_THREADS", "1")
    if os.geteuid() == 0:
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return environment


@contextlib.contextmanager
def segments_folder(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Hold a folder for Open MPI's shared memory, which a rank that is killed leaves behind.

    Yields:
      The variables that tell Open MPI; none where they are set or there is no /dev/shm.
    """
    if any(name in environ for name in _BACKING) or not os.access(_SHARED_MEMORY, os.W_OK):
        yield {}
        return
    with tempfile.TemporaryDirectory(
        prefix="hpcrl-", dir=_SHARED_MEMORY, ignore_cleanup_errors=True
    ) as folder:
        yield dict.fromkeys(_BACKING, folder)


def run_mpirun(
    command: Sequence[str], ranks: int, outcome: Callable[[], int] = lambda: exit_codes.INTERNAL
) -> int:
    """Run mpirun to its end and return its exit code, 70 in place of undocumented ones.

    SIGINT and SIGTERM become SIGUSR2, which mpirun hands to the ranks as the request to
    checkpoint and stop; a second one ends the job at once. The request is repeated until
    the job has ended, as mpirun and the ranks can't take it in their first moments; a job
    that it kills there has lost nothing and can be started again like any stopped one.
    Should this process be killed, the system makes the same request in its place.
    An mpirun that outlives its ranks is killed; `outcome` then says how they ended.
    """
    with segments_folder(os.environ) as variables:
        return _run(command, {**launch_environment(ranks), **variables}, outcome)


def _run(command: Sequence[str], environ: Mapping[str, str], outcome: Callable[[], int]) -> int:
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    requests = 0
    process: subprocess.Popen[bytes] | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal requests
        requests += 1
        if requests > 1 and number != signal.SIGUSR2 and process is not None:
            process.terminate()

    for number in handled:
        signal.signal(number, note)
    process = subprocess.Popen(
        command,
        env=environ,
        start_new_session=True,
        preexec_fn=_outlive_nobody(os.getpid()),
    )
    children = _Children(process.pid)
    while True:
        try:
            code = process.wait(timeout=_POLL_S)
            break
        except subprocess.TimeoutExpired:
            if children.gone_s() > _LINGER_S:
                process.kill()
                process.wait()
                return outcome()
            if requests:
                process.send_signal(signal.SIGUSR2)
    children.wait_until_gone()
    code = 128 - code if code < 0 else code
    if requests and code == 128 + signal.SIGUSR2:
        return exit_codes.REQUEUE
    # mpirun has codes of its own for a job that it had to end.
    return code if code in _DOCUMENTED else exit_codes.INTERNAL


class _Children:
    """Since when a process has no live children, once it had some; never where /proc can't say."""

    def __init__(self, pid: int):
        self._tasks = Path(f"/proc/{pid}/task")
        self._seen_s: float | None = None
        self._pids: list[str] = []

    def gone_s(self) -> float:
        """Return the seconds since it was last seen with a live child."""
        now_s = time.monotonic()
        if self._any():
            self._seen_s = now_s
        return 0.0 if self._seen_s is None else now_s - self._seen_s

    def wait_until_gone(self) -> None:
        """Wait for ranks that outlive their mpirun: who starts the run again finds none of them."""
        end_s = time.monotonic() + _LINGER_S
        while any(self._lives(pid) for pid in self._pids) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def _any(self) -> bool:
        try:
            pids = [p for task in self._tasks.iterdir() for p in self._read(task / "children")]
        except OSError:
            return False
        self._pids = [pid for pid in pids if self._lives(pid)] or self._pids
        return any(self._lives(pid) for pid in pids)

    @staticmethod
    def _read(path: Path) -> list[str]:
        try:
            return path.read_text().split()
        except OSError:
            return []

    @staticmethod
    def _lives(pid: str) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _outlive_nobody(parent: int) -> Callable[[], None]:
    """Return what mpirun's process does first: be asked to stop when `parent` dies."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2)
        if os.getppid() != parent:  # it has died already
            os._exit(exit_codes.INTERNAL)

    return ask
