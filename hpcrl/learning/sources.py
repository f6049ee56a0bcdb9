"""Where a learner's batches come from: the on-policy queue, or the replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hpcrl.comm.agreement import Rule
from hpcrl.comm.link import Group
from hpcrl.comm.unroll_flow import UnrollInbox
from hpcrl.job import Job
from hpcrl.layouts import waits_for_weights
from hpcrl.learning.batches import assemble
from hpcrl.learning.trainer import StepResult
from hpcrl.types import UnrollBatch


class Taken(NamedTuple):
    """A batch and what comes with it.

    Attributes:
      batch: this learner's share, in host memory.
      num_steps: agent steps that the run's counters advance by; None: those trained on.
      values: figures to show.
      stale_unrolls: unrolls that all learners dropped for their age since the batch before.
    """

    batch: UnrollBatch
    num_steps: int | None
    values: dict[str, float]
    stale_unrolls: int = 0


class Source(Protocol):
    """Gives batches to one learner; `take` belongs to a step that all learners agreed on.

    Attributes:
      rules: the numbers that the learners agree on before each step, and how.
      version: of the learner's weights; it keeps this up to date.
    """

    rules: Mapping[str, Rule]
    version: int

    def serve(self) -> bool:
        """Take in what has arrived, at once; return whether there was anything."""

    def ready(self) -> bool:
        """Whether this learner should cast its vote."""

    def vote(self) -> dict[str, float]:
        """Return this learner's numbers for `rules`, when it casts its vote."""

    def agree(self, agreed: Mapping[str, float], checkpoint_durable: bool) -> bool:
        """Act on the outcome of a vote that did not end the run.

        Args:
          agreed: the outcome for `rules`.
          checkpoint_durable: whether the last checkpoint is.

        Returns:
          Whether every learner has a batch; if not, there is no step.
        """

    def take(self, agreed: Mapping[str, float]) -> Taken:
        """Return a batch; `ready` was true on every learner when it voted."""

    def feedback(self, result: StepResult) -> None:
        """Learn from what the step on the last batch gave."""

    def status(self) -> str:
        """Say what there is, for a message of a wait that takes too long."""

    def discard(self) -> None:
        """Throw away what has arrived, as the run ends."""

    def saved(self, learner_steps: int) -> dict[str, Any] | None:
        """Return what was kept for a run that goes on from these learner steps; on the root."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Take that back."""

    def begin_save(self, learner_steps: int) -> None:
        """Begin to keep, beside training, what goes with a checkpoint."""

    def save(self, learner_steps: int, group: Group) -> None:
        """Keep what goes with the last checkpoint; nothing arrives any more.

        All members of `group`, the learners, call it.
        """

    def close(self) -> None:
        """Withdraw the posted receives, once all ranks are done."""


class OnPolicyQueue:
    """Unrolls in order of arrival, each trained on once. A `Source`.

    Under `learner.max_policy_lag` those that are too old are dropped as they are found, which is
    before any vote on a batch with them; or, where acting waits instead, a batch takes a fixed
    share of each source's unrolls, as the sources count on (`pacing.LagTickets`).
    """

    def __init__(self, job: Job):
        self.rules: Mapping[str, Rule] = {"policy_lag_max": "max", "stale_unrolls": "sum"}
        self.version = 0
        self._job = job
        self._batch_unrolls = job.local_batch_unrolls
        clients = job.topology.clients_of[job.rank]
        slots = job.queue_slots_per_source(len(clients))
        self._inbox = UnrollInbox(job.link, clients, job.unroll, slots)
        self._shares: list[int] | None = None
        self._max_lag = job.config.learner.max_policy_lag
        if waits_for_weights(job.config):
            self._shares = list(job.unroll_shares(job.rank).values())
            self._max_lag = None
        self._dropped = 0
        self._looked_at = (-1, 0)

    def serve(self) -> bool:
        """Take note of arrived unrolls; return whether there were any."""
        arrived = self._inbox.poll()
        self._drop_stale()
        return arrived

    def _drop_stale(self) -> None:
        """Drop what is too old already; between a vote and its step no version changes."""
        looking_at = (self.version, len(self._inbox))
        if self._max_lag is None or looking_at == self._looked_at:
            return
        slots = self._inbox.first(len(self._inbox))
        stale = slots[self._lag(slots) > self._max_lag]
        self._inbox.remove(stale)
        self._inbox.release(stale)
        self._dropped += len(stale)
        self._looked_at = (self.version, len(self._inbox))

    def ready(self) -> bool:
        """Whether a batch has arrived."""
        enough = len(self._inbox) >= self._batch_unrolls
        return enough and len(self._next()) == self._batch_unrolls

    def _next(self) -> npt.NDArray[np.intp]:
        """Return the slots of the next batch, fewer where it is not complete yet."""
        if self._shares is None:
            return self._inbox.first(self._batch_unrolls)
        return self._inbox.first_of_each(self._shares)

    def vote(self) -> dict[str, float]:
        """Return how old the next batch's oldest row is, and what was dropped since the last."""
        dropped, self._dropped = self._dropped, 0
        lag = float(self._lag(self._next()).max(initial=0))
        return {"policy_lag_max": lag, "stale_unrolls": dropped}

    def _lag(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return how far behind the oldest acting row of each unroll is, `<int64>[n]`."""
        version = self._inbox.views["policy_version"][slots, :-1]
        final = self._inbox.views["final"][slots, :-1]
        oldest = np.where(final, self.version, version).min(1, initial=self.version)
        lag: npt.NDArray[np.int64] = self.version - oldest
        return lag

    def agree(self, agreed: Mapping[str, float], checkpoint_durable: bool) -> bool:
        """Everyone voted because it had a batch."""
        return True

    def take(self, agreed: Mapping[str, float]) -> Taken:
        """Return the oldest unrolls; their slots receive again."""
        inbox = self._inbox
        fill = inbox.fill
        slots = self._next()
        inbox.remove(slots)
        batch = assemble(inbox.views, slots, self._job.env, self._job.behaviour)
        inbox.release(slots)
        values = {"queue_fill": fill, "policy_lag_max": agreed["policy_lag_max"]}
        return Taken(batch, None, values, int(agreed["stale_unrolls"]))

    def feedback(self, result: StepResult) -> None:
        """Nothing to learn: the unrolls are gone."""

    def status(self) -> str:
        """Say how many unrolls there are."""
        dropped = f", dropped {self._dropped} as too old" if self._dropped else ""
        return f"has {len(self._next())} of {self._batch_unrolls} unrolls{dropped}"

    def discard(self) -> None:
        """Throw away what has arrived."""
        self._inbox.discard()

    def saved(self, learner_steps: int) -> dict[str, Any] | None:
        """Nothing is kept."""
        return None

    def restore(self, saved: dict[str, Any]) -> None:
        """Nothing was kept."""

    def begin_save(self, learner_steps: int) -> None:
        """Nothing to keep."""

    def save(self, learner_steps: int, group: Group) -> None:
        """Nothing to keep."""

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._inbox.close()
