#!/usr/bin/env python3
"""A private Slurm on this one host, with several nodes and fake GPUs, for tests and rehearsals.

    slurm/testcluster.py [--nodes 3] [--cpus 4] [--gpus 2] -- COMMAND ...

It installs nothing: munged, slurmctld and slurmd must be there (Debian: slurm-wlm, munge). All
state is in a temporary directory and the daemons end with COMMAND, whose exit code it returns.
Without COMMAND it opens a shell in which sbatch, srun and scontrol talk to this cluster.
"""

from __future__ import annotations

import argparse
import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

_ADMIN_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
_START_S = 60.0
_STOP_S = 15.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1

_SLURM_CONF = """\
ClusterName=hpcrltest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
CryptoType=crypto/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,defer
StateSaveLocation={dir}/state
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmdLogFile={dir}/slurmd-%n.log
SlurmdSpoolDir={dir}/spool-%n
TmpFS={dir}/tmp-%n
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout_s}
KillWait=5
MinJobAge=600
InactiveLimit=0
Waittime=0
ReturnToService=1
GresTypes=gpu
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(RuntimeError):
    """The cluster can't be started; the message says why."""


class TestCluster:
    """Starts the daemons on entry, stops them on exit.

    Args:
      num_nodes: slurmd daemons, named m1, m2, ...
      cpus: CPUs of each node; more than the host has is fine, nothing is bound.
      gpus: fake GPUs of each node. Slurm counts them and sets CUDA_VISIBLE_DEVICES.
      slurmd_timeout_s: a node is down when its slurmd didn't answer for this long.

    Attributes:
      environ: the environment in which Slurm's commands talk to this cluster.
    """

    __test__ = False  # not a test class, whatever pytest makes of its name

    def __init__(
        self, num_nodes: int = 3, cpus: int = 4, gpus: int = 2, slurmd_timeout_s: int = 300
    ):
        self.names = [f"m{i + 1}" for i in range(num_nodes)]
        self._cpus, self._gpus = cpus, gpus
        self._slurmd_timeout_s = slurmd_timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # munged refuses a socket whose path others can't reach or could have replaced.
        self.dir = Path(tempfile.gettempdir())
        self.environ = dict(os.environ)

    def __enter__(self) -> TestCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the daemons and return when all nodes are idle.

        Raises:
          ClusterError: a program is missing or a daemon doesn't come up.
        """
        search = os.pathsep.join([os.environ.get("PATH", ""), _ADMIN_PATH])
        missing = [name for name in PROGRAMS if shutil.which(name, path=search) is None]
        if missing:
            raise ClusterError(
                f"no {', '.join(missing)}: apt-get install slurm-wlm munge openmpi-bin libpmix-dev"
            )
        self.dir = Path(tempfile.mkdtemp(prefix="hpcrl-slurm-"))
        self.dir.chmod(0o755)
        self.environ = {
            name: value
            for name, value in os.environ.items()
            # A job started from inside another job would take over its settings.
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        }
        self.environ |= {"PATH": search, "SLURM_CONF": str(self.dir / "slurm.conf")}
        self._write_files()
        self._start("munged", *self._munged_arguments())
        self._wait_for("munged's socket", (self.dir / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for name in self.names:
            self.start_node(name)
        self.wait_idle()

    def stop(self) -> None:
        """End the jobs, then the daemons, and remove the directory."""
        if self._daemons:
            self.run("scancel", "--user", getpass.getuser(), check=False)
            self._wait_quietly(lambda: not self.run("squeue", "-h", check=False).strip())
        # slurmd before slurmctld: it says good-bye; munged last, as all talk through it.
        for name in [*self.names, "slurmctld", "munged"]:
            self.stop_daemon(name)
        if (self.dir / "slurm.conf").exists():
            shutil.rmtree(self.dir, ignore_errors=True)

    def start_node(self, name: str) -> None:
        """Start the slurmd of one node."""
        self._start(name, "-D", "-N", name, program="slurmd")

    def stop_daemon(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one daemon: a node by its name, "slurmctld" or "munged"."""
        process = self._daemons.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run one of Slurm's commands and return what it printed.

        Raises:
          ClusterError: it failed and `check` is set.
        """
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=timeout_s
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def wait_idle(self) -> None:
        """Return when every node is idle.

        Raises:
          ClusterError: they aren't in a minute; with the end of slurmctld's log.
        """
        self._wait_for("idle nodes", self._all_idle)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return states == ["idle"] * len(self.names)

    def _write_files(self) -> None:
        for folder in ("state", "dev", *(f"tmp-{name}" for name in self.names)):
            (self.dir / folder).mkdir()
        for name in self.names:
            (self.dir / f"spool-{name}").mkdir()
        key = self.dir / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        gres = self._make_gpus()
        ports = _free_ports(len(self.names) + 1)
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self._cpus} RealMemory=1000 {gres} State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        )
        (self.dir / "slurm.conf").write_text(
            _SLURM_CONF.format(
                host=host,
                port=ports[0],
                user=getpass.getuser(),
                dir=self.dir,
                slurmd_timeout_s=self._slurmd_timeout_s,
                nodes=nodes,
            )
        )
        # Without this file slurmd looks for a cgroup version, which a container may not have.
        (self.dir / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _make_gpus(self) -> str:
        """Write gres.conf; return the node's part of slurm.conf, "" where no GPU can be faked."""
        if not self._gpus:
            return ""
        try:
            for index in range(self._gpus):
                # Slurm sets CUDA_VISIBLE_DEVICES only for character devices named with a number.
                path = self.dir / "dev" / f"nvidia{index}"
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            raise ClusterError(
                "only root can make device files for fake GPUs: give --gpus 0"
            ) from None
        files = self.dir / "dev" / f"nvidia[0-{self._gpus - 1}]"
        (self.dir / "gres.conf").write_text(f"Name=gpu File={files} Flags=nvidia_gpu_env\n")
        return f"Gres=gpu:{self._gpus}"

    def _munged_arguments(self) -> list[str]:
        files = {
            "--key-file": "munge.key",
            "--socket": "munge.socket",
            "--pid-file": "munged.pid",
            "--log-file": "munged.log",
            "--seed-file": "munged.seed",
        }
        # --force: munged warns of, and otherwise refuses, a directory below /tmp.
        return ["--foreground", "--force", *(f"{k}={self.dir / v}" for k, v in files.items())]

    def _start(self, name: str, *arguments: str, program: str = "") -> None:
        program = program or name
        path = shutil.which(program, path=self.environ["PATH"]) or program
        with (self.dir / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the user's shell must not end the daemons before the jobs.
                start_new_session=True,
                preexec_fn=_end_with(os.getpid()),
            )

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _START_S
        while not condition():
            for name, process in self._daemons.items():
                if process.poll() is not None:
                    raise ClusterError(f"{name} ended with {process.returncode}: {self._logs()}")
            if time.monotonic() > end_s:
                raise ClusterError(f"no {what} in {_START_S:.0f} s: {self._logs()}")
            time.sleep(_POLL_S)

    def _wait_quietly(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _STOP_S
        while not condition() and time.monotonic() < end_s:
            time.sleep(_POLL_S)

    def _logs(self) -> str:
        texts = []
        for path in sorted([*self.dir.glob("*.log"), *self.dir.glob("*.out")]):
            lines = path.read_text(errors="replace").splitlines()[-10:]
            texts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(texts)


def _end_with(parent: int) -> Callable[[], None]:
    """Return what a daemon's process does first: be asked to end when `parent` dies."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died already
            os._exit(1)

    return ask


def _free_ports(count: int) -> list[int]:
    """Return ports that nothing on this host listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on a private cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=4, help="of each node")
    parser.add_argument("--gpus", type=int, default=0 if os.geteuid() else 2, help="of each node")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = [part for part in options.command if part != "--"] or [
        os.environ.get("SHELL", "/bin/sh")
    ]
    try:
        with TestCluster(options.nodes, options.cpus, options.gpus) as cluster:
            return subprocess.run(command, env=cluster.environ).returncode
    except ClusterError as error:
        print(f"testcluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
