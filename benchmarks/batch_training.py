"""One launch of a training job under Slurm, with what the benchmarks ask of a job."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import yaml

from hpcrl import exit_codes
from hpcrl.run.verdict import read_attempts
from tests.job_runner import TrainingJob
from tests.mpi_runner import ROOT
from tests.slurm.batch_job import OVER, SITE, WHEEL_SITE, Job, submission

LOOK_S = 0.1


class BatchTraining(TrainingJob):
    """A configuration trained by a batch script, which is told not to start it again.

    Args:
      cluster: with a node of as many processors as ranks.
      config: path of the configuration, whose topology gives every count.
      overrides: options of `hpcrl train`.
      script: in slurm/; train_mpirun.sbatch takes the wheel's mpirun, others Debian's srun.
      program: module in place of hpcrl.
      env: more variables.
    """

    def __init__(
        self, cluster, config, *overrides, script="train.sbatch", program="hpcrl", env=None
    ):
        data = yaml.safe_load(Path(config).read_text())
        teams = data["env"].get("ranks_per_env", 1)
        counts = dict(data["topology"])
        counts["actors"] *= teams
        self._mark = uuid.uuid4().hex
        self._log = Path(config).with_name(f"output-{self._mark[:8]}")
        python = Path(config).with_name("python.sh")
        python.write_text(
            "#!/bin/bash\n"
            'arguments=("$@")\n'
            f'[ "${{3:-}}" = mpi4py ] && arguments[4]={program}\n'
            f'exec {sys.executable} "${{arguments[@]}}"\n'
        )
        python.chmod(0o755)
        mpirun = script == "train_mpirun.sbatch"
        variables = {
            "HPCRL_SITE": WHEEL_SITE if mpirun else SITE,
            "HPCRL_PYTHON": python,
            "HPCRL_MPIRUN": Path(sys.executable).with_name("mpirun"),
            "HPCRL_MAX_RESTARTS": 0,
            "HPCRL_REQUEUE": 0,
            self._MARK: self._mark,
            **(env or {}),
        }
        run = Path(data["run"]["dir"])
        id_ = cluster.run(
            *("sbatch", "--parsable", *submission(self._log, **variables)),
            *("--nodes=1", f"--ntasks-per-node={sum(counts.values())}"),
            *(str(ROOT / "slurm" / script), str(config), "--run.dir", str(run)),
            *map(str, overrides),
        ).strip()
        self.job = Job(cluster, run, self._log, id_)
        self.process = self

    @property
    def returncode(self):
        """The job's exit code, None while it lives; 75 for a stop, after which it may not go on."""
        fields = self.job.fields
        if fields["JobState"] not in OVER:
            return None
        mine = [a for a in read_attempts(self.job.run) if a.job == self.job.id]
        if mine and mine[-1].exit_code == exit_codes.REQUEUE:
            return exit_codes.REQUEUE
        return int(fields["ExitCode"].split(":")[0])

    def poll(self):
        """As `subprocess.Popen.poll`."""
        return self.returncode

    def wait(self, timeout):
        """As `subprocess.Popen.wait`."""
        end_s = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(f"job {self.job.id}", timeout)
            time.sleep(LOOK_S)
        return code

    def signal(self, number):
        """A request to stop comes to the batch shell, as near the wall limit."""
        name = signal.Signals(number).name.removeprefix("SIG")
        self.job.cluster.run("scancel", "--batch", "-s", name, self.job.id)

    def kill(self):
        """End the job and every process of it."""
        self.job.cluster.run("scancel", self.job.id, check=False)
        self.wait(60.0)
        for process in self.processes():
            os.kill(process.pid, signal.SIGKILL)
