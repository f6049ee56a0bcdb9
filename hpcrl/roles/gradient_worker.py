"""Gradient worker: env → inference → unroll → gradient in one rank, and parameters back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from env_wrappers import EnvBatch
from hpcrl.acting.acting_rank import ActingPort, make_policy
from hpcrl.acting.local_group import LocalGroups
from hpcrl.acting.pacing import PacedPolicy
from hpcrl.brain import Brain
from hpcrl.comm.gradient_flow import GradientExchange
from hpcrl.comm.link import wait_until
from hpcrl.job import GRADIENT_STAGES, INFERENCE_STAGES, Job
from hpcrl.learning.backward import NonFiniteLossError
from hpcrl.learning.batches import save_batch
from hpcrl.learning.gradients import Gradient, GradientComputer, join_unrolls
from hpcrl.timing import StageTimer, Waiter

Unrolls = npt.NDArray[np.uint8]


class ServersPort(ActingPort):
    """A worker's messages with all parameter servers."""

    def __init__(self, job: Job, policy: PacedPolicy):
        super().__init__(job, policy, job.root)
        servers = job.topology.learner_ranks
        self.exchange = GradientExchange(job.link, servers, job.gradients, job.parameters)

    def send(self, gradient: Gradient) -> None:
        """Send each server its shard of a gradient."""
        self.exchange.send(*gradient)

    def newer(self) -> npt.NDArray[np.float32] | None:
        """Return the parameters `<float32>[P]` once all servers have answered, else None."""
        parameters = self.exchange.poll()
        if parameters is not None and self.exchange.fate.dropped:
            self.stats.totals["dropped_gradients"] += 1
        return parameters

    def finish(self, report: Callable[[], None], waiter: Waiter) -> None:
        """Take the answers that are under way, report, and leave when the root says EXIT."""
        wait_until(lambda: not self.exchange.open or self.newer() is not None, waiter)
        self.leave(report, waiter)
        self.exchange.close()


class GradientWorker:
    """A worker's parts, assembled; `run` is its loop."""

    def __init__(
        self, job: Job, brain: Brain, device: torch.device, groups: Sequence[EnvBatch]
    ) -> None:
        policy = make_policy(job, brain, device, job.env_ids(job.rank))
        if not isinstance(policy, PacedPolicy):
            raise TypeError("a worker acts with one version of the weights for each gradient")
        self.job, self.policy = job, policy
        self.port = ServersPort(job, policy)
        stages = ("step", *INFERENCE_STAGES, *GRADIENT_STAGES)
        self.timer = StageTimer(stages, pulse=job.link.pulse)
        self.local = LocalGroups(job, groups, self.port.stats, self.timer)
        seed = job.seed("gradient", job.role_index)
        self._computer = GradientComputer(brain, job.config.learner, device, seed)
        self._complete: list[Unrolls] = []

    def load(self, parameters: npt.NDArray[np.float32]) -> None:
        """Act, and compute the next gradient, with newer parameters."""
        # Of several shards the first one's version stands for the copy.
        self.policy.load(parameters, int(self.port.exchange.versions[0]))
        self._computer.load(parameters)
        self.timer.mark("weights")
        self.local.resume(self.policy)

    def keep(self, complete: list[Unrolls]) -> None:
        """Keep unrolls for the next gradient."""
        self._complete += complete
        self.port.stats.totals["unrolls"] += sum(map(len, complete))

    def gradient(self) -> Gradient:
        """Return the gradient of what has been kept.

        Raises:
          NonFiniteLossError: it isn't finite; the batch is in the run directory.
        """
        job = self.job
        batch = join_unrolls(self._complete, job.unroll, job.env, job.behaviour)
        self._complete.clear()
        try:
            return self._computer.compute(batch, self.policy.version, self.timer)
        except NonFiniteLossError:
            save_batch(job.run_dir / f"nan_batch_rank{job.rank}.npz", batch)
            raise

    def report(self) -> None:
        """Send the root what there is to count."""
        seconds, stats = dict(self.timer.seconds), self.port.stats
        stats.set_stages("actor", {"step": seconds.pop("step")})
        stats.set_stages("worker", {stage: seconds.pop(stage) for stage in GRADIENT_STAGES})
        stats.set_stages("inference", seconds)
        self.local.note(self.policy)
        self.port.report()


def run(job: Job, brain: Brain, device: torch.device, groups: Sequence[EnvBatch]) -> None:
    """Act and send gradients until the root says STOP."""
    worker = GradientWorker(job, brain, device, groups)
    policy, port, local, timer = worker.policy, worker.port, worker.local, worker.timer
    exchange = port.exchange
    waiter = job.link.waiter(
        lambda: (
            f"{job.link.label} (rank {job.rank}) waited for parameters from learner ranks "
            f"{exchange.waits_for()}"
        )
    )
    timer.mark("step")
    exchange.ask()
    while not port.stopped():
        if port.stats.due:
            worker.report()
        if exchange.open:
            parameters = port.newer()
            if parameters is None:
                waiter.idle()
                timer.mark("exchange")
                continue
            waiter.progress()
            worker.load(parameters)
        if local.all_held:
            port.send(worker.gradient())
            timer.mark("exchange")
            continue
        group = local.next()
        if group.held:
            continue
        waiting = group.rows()
        timer.mark("batch")
        actions = policy.act(waiting)
        timer.mark("forward")
        worker.keep(policy.record())
        port.stats.totals["batches"] += 1
        port.stats.totals["rows"] += len(waiting.ids)
        timer.mark("unroll")
        if policy.satisfied[group.ids].all():
            policy.hold(group.ids)
            group.held = True
            continue
        local.step(group, waiting.ids, actions)

    port.finish(worker.report, waiter)
    local.close()
