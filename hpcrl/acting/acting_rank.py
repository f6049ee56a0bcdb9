"""What an inference rank and a worker share: a policy, and the messages with their learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hpcrl.acting.pacing import LagTickets, PacedPolicy, Quota, VersionShares
from hpcrl.acting.policy import ActingPolicy
from hpcrl.brain import Brain
from hpcrl.comm.commands import CommandReceiver
from hpcrl.comm.link import wait_until
from hpcrl.comm.stats import StatsReporter
from hpcrl.comm.unroll_flow import UnrollOutbox
from hpcrl.comm.weights import WeightsSubscriber
from hpcrl.comm.wire import Command
from hpcrl.job import Job
from hpcrl.layouts import rules_of, waits_for_weights
from hpcrl.timing import Waiter

if TYPE_CHECKING:
    from hpcrl.recording import Recorder


def make_policy(
    job: Job, brain: Brain, device: torch.device, env_ids: npt.NDArray[np.int64]
) -> ActingPolicy:
    """Build the policy of this rank for `env_ids`, in the order of its rows."""
    settings = (
        brain,
        job.env,
        job.unroll,
        job.config.learner.unroll_steps,
        env_ids,
        device,
        job.config.inference.precision,
        # Rank i of either acting role draws the same stream: with equal batches they act alike.
        job.seed("inference", job.role_index),
        brain.exploration(env_ids, job.num_envs),
        job.config.inference.cuda_graphs,
    )
    quota = make_quota(job, len(env_ids))
    return ActingPolicy(*settings) if quota is None else PacedPolicy(*settings, quota=quota)


def make_quota(job: Job, num_envs: int) -> Quota | None:
    """Return how far this rank's acting may run ahead of the weights; None: as far as credits."""
    learner, rules = job.config.learner, rules_of(job.config)
    if rules.asynchronous_gradients:
        return VersionShares(num_envs, learner.batch_unrolls // num_envs)
    if rules.synchronous:
        return VersionShares(num_envs, learner.batch_unrolls // job.num_envs)
    if not waits_for_weights(job.config) or learner.max_policy_lag is None:
        return None
    shares = job.unroll_shares(job.topology.learner_of[job.rank])
    return LagTickets(num_envs, shares[job.rank], learner.max_policy_lag)


def recorder_of(
    job: Job, env_ids: npt.NDArray[np.int64], evaluation: npt.NDArray[np.bool_]
) -> Recorder | None:
    """Return the recorder of this rank; see `open_recorder`, without which h5py isn't loaded."""
    if not job.config.recording.enabled:
        return None
    from hpcrl.recording import open_recorder

    return open_recorder(job, env_ids, evaluation)


class ActingPort:
    """What any acting rank tells the root learner, and what it is told.

    Args:
      job: the job.
      policy: of this rank; its rows are recorded if the configuration asks for it.
      commander: rank of the learner that says STOP.

    Attributes:
      stats: counters for the root learner.
    """

    def __init__(self, job: Job, policy: ActingPolicy, commander: int):
        link = job.link
        self.stats = StatsReporter(link, job.root, job.config.metrics.every_s / 2)
        self._recorder = recorder_of(job, policy.env_ids, policy.evaluation)
        policy.sink = self._recorder
        self._commands = CommandReceiver(link, commander)

    def stopped(self) -> bool:
        """Whether the learner has said STOP; true once."""
        return self._commands.poll() is Command.STOP

    def report(self) -> None:
        """Send the statistics, with what was recorded."""
        if self._recorder:
            self.stats.totals.update(self._recorder.totals())
        self.stats.send()

    def leave(self, report: Callable[[], None], waiter: Waiter) -> None:
        """Report for the last time, and return when the learner says EXIT."""
        wait_until(self.stats.sent, waiter)
        report()
        wait_until(self.stats.done, waiter)
        self._commands.say_done()
        # The learner may still be sending weights; it says EXIT when it isn't.
        wait_until(lambda: self._commands.poll() is Command.EXIT, waiter)
        self._commands.close()
        if self._recorder:
            self._recorder.close()


class LearnerPort(ActingPort):
    """An acting rank's messages with its learner.

    Attributes:
      learner: the learner's rank.
      outbox: unrolls on their way.
      lost_ranks: actors of this rank that have died.
    """

    def __init__(self, job: Job, policy: ActingPolicy):
        link = job.link
        self.lost_ranks = link.lost_ranks
        self.learner = job.topology.learner_of[job.rank]
        super().__init__(job, policy, self.learner)
        sources = len(job.topology.clients_of[self.learner])
        self.outbox = UnrollOutbox(link, self.learner, job.unroll, job.credits(sources))
        self._policy = policy
        self._weights = WeightsSubscriber(link, self.learner, policy.num_parameters)

    def load_newer(self) -> bool:
        """Give the policy newer weights if they have arrived; say whether they have."""
        newer = self._weights.poll()
        if newer is None:
            return False
        self._policy.load(newer, self._weights.version)
        self._weights.renew()
        return True

    def send(self, complete: list[npt.NDArray[np.uint8]]) -> None:
        """Queue complete unrolls `<uint8>[n, nbytes]`."""
        for unrolls in complete:
            self.stats.totals["unrolls"] += len(unrolls)
            self.outbox.put(unrolls)

    def need(self) -> str:
        """Say what this rank waits for besides steps."""
        if self._policy.version < 0:
            return "the first weights"
        return "credits" if self.outbox.blocked else "steps or newer weights"

    def finish(self, report: Callable[[], None], waiter: Waiter) -> None:
        """Send what is left to report, and leave when the learner says EXIT."""
        outbox = self.outbox
        outbox.abandon()
        wait_until(lambda: outbox.in_flight == 0, waiter)
        self.leave(report, waiter)
        self._weights.close()
