"""Simulated ranks that step environments and choose actions: actors, inference ranks, workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.bench.simulated_ranks import Learner, Rank, Source
from hpcrl.job import full_batch_rows

if TYPE_CHECKING:
    from hpcrl.bench.simulator import SimulatedJob


class Group:
    """A group of environments and its unrolls under construction.

    Their rows come together, so they are counted once for all of them.
    """

    def __init__(self, job: SimulatedJob, actor: Actor | None = None):
        self.actor = actor
        self._job = job
        self._rows = 0
        self._versions = 0.0
        self.given = 0  # unrolls of the current version, where acting waits for learning

    def append(self, version: int) -> list[float]:
        """Append a row; return the mean version of each unroll that it completes."""
        length = self._job.unroll_steps
        if self._job.quota and self.given >= self._job.quota:
            return []
        if self._rows == length:  # this one is the bootstrap of one unroll and row 0 of the next
            mean = self._versions / length
            self._rows, self._versions = 1, float(version)
            self.given += 1
            return [mean] * self._job.rows
        self._rows += 1
        self._versions += version
        return []

    @property
    def satisfied(self) -> bool:
        """Whether it owes the current version nothing."""
        return bool(self._job.quota) and self.given >= self._job.quota

    def renew(self) -> None:
        """Newer weights have come: unrolls begin anew, and each is owed again."""
        self.given = 0
        self._rows = 0
        self._versions = 0.0


class Actor(Rank):
    """Steps its groups in turn; a group waits for its actions."""

    def __init__(self, job: SimulatedJob, rank: int, server: Inference):
        super().__init__(job, rank)
        self._server = server
        self.groups = [Group(job, self) for _ in range(job.groups)]
        self._replied = [True] * job.groups
        self._turn = 0

    def proceed(self) -> None:
        """Step the group whose turn it is, or wait for its actions."""
        turn = self._turn
        if not self._replied[turn]:
            self.idle()
            return
        self._replied[turn] = False
        job = self.job
        work_s = job.rows * job.costs.env_s * job.jitter() + job.costs.message_s / 2
        self.compute(work_s, lambda: job.clock.after(job.rows * job.costs.env_sleep_s, self._sent))

    def _sent(self) -> None:
        job, turn = self.job, self._turn
        self.worked_s += job.rows * job.costs.env_sleep_s
        job.send(self, self._server, job.costs.step_bytes, self._server.arrive, self.groups[turn])
        self._turn = (turn + 1) % len(self.groups)
        self.proceed()

    def reply(self, group: Group) -> None:
        """Take a group's actions."""
        self._replied[self.groups.index(group)] = True
        self.wake(self.proceed)


class Inference(Source):
    """Batches the steps of its actors' groups."""

    def __init__(self, job: SimulatedJob, rank: int, learner: Learner):
        super().__init__(job, rank, learner)
        self.actors = [Actor(job, actor, self) for actor in job.topology.actors_of[rank]]
        self._clients = len(self.actors) * job.groups
        self._full = full_batch_rows(job.config, self._clients * job.rows)
        self._waiting: list[Group] = []
        self._held: list[Group] = []
        self._first_s = 0.0

    @property
    def acting(self) -> list[Rank]:
        """Its actors."""
        return [*self.actors]

    def begin(self) -> None:
        """Let the actors step."""
        self.idle()
        for actor in self.actors:
            actor.proceed()

    def arrive(self, group: Group) -> None:
        """Take note of a group that waits for actions."""
        if not self._waiting:
            self._first_s = self.job.clock.now
        self._waiting.append(group)
        self.wake(self.loop, self.job.config.inference.max_wait_s)

    def loop(self) -> None:
        """Load newer weights, serve a batch that is due, or wait."""
        if self.newer is not None:
            self.load()
            return
        self.pump()
        waiting, clock = len(self._waiting), self.job.clock
        limit_s = self.job.config.inference.max_wait_s
        if self.blocked or not waiting:
            self.idle()
            return
        rows = waiting * self.job.rows
        late = clock.now - self._first_s >= limit_s * (1 - 1e-9)
        if rows >= self._full or waiting == self._clients or late:
            self._serve()
            return
        self.idle()
        clock.after(self._first_s + limit_s - clock.now, self.wake, self.loop)

    def _serve(self) -> None:
        groups, self._waiting = self._waiting, []
        job, costs = self.job, self.job.costs
        job.count_batch(len(groups) * job.rows)
        work_s = costs.act_batch_s + len(groups) * job.rows * costs.act_row_s
        messages_s = len(groups) * costs.message_s / 2
        self.compute(messages_s, lambda: self._act(groups, work_s))

    def _act(self, groups: list[Group], work_s: float) -> None:
        self.compute(work_s, lambda: self._answer(groups), on_device=True)

    def _answer(self, groups: list[Group]) -> None:
        job = self.job
        unrolls = [version for group in groups for version in group.append(self.version)]
        for group in groups:
            actor = group.actor
            if actor is not None and all(other.satisfied for other in actor.groups):
                self._held.append(group)
            elif actor is not None:
                job.send(self, actor, 0, actor.reply, group)
        record_s = len(groups) * job.rows * job.costs.record_row_s

        def recorded() -> None:
            self.put(unrolls)
            self.loop()

        self.compute(record_s, recorded)

    def loaded(self) -> None:
        """Choose actions for held groups with the newer weights."""
        if not self.job.quota:
            self.loop()
            return
        for actor in self.actors:
            for group in actor.groups:
                group.renew()
        groups, self._held = self._held, []
        if groups:
            work_s = self.job.costs.act_batch_s
            work_s += len(groups) * self.job.rows * self.job.costs.act_row_s
            self._act(groups, work_s)
        else:
            self.loop()


class Worker(Source):
    """Chooses actions for its own groups, and steps them, in turn."""

    def __init__(self, job: SimulatedJob, rank: int, learner: Learner):
        super().__init__(job, rank, learner)
        self._groups = [Group(job) for _ in range(job.groups)]
        self._held = [False] * job.groups
        self._turn = 0
        self._at_boundary = True

    def begin(self) -> None:
        """Act on the first group."""
        self.loop()

    def loop(self) -> None:
        """Load newer weights where unrolls end, act on the next group, or wait."""
        if self._at_boundary and self.newer is not None:
            self.load()
            return
        self.pump()
        if self.blocked or all(self._held):
            self.idle()
            return
        while self._held[self._turn]:
            self._turn = (self._turn + 1) % len(self._groups)
        job, costs = self.job, self.job.costs
        job.count_batch(job.rows)
        work_s = costs.act_batch_s + job.rows * costs.act_row_s
        self.compute(work_s, self._record, on_device=True)

    def _record(self) -> None:
        group, turn = self._groups[self._turn], self._turn
        unrolls = group.append(self.version)
        self._at_boundary = bool(unrolls) or bool(self.job.quota)
        self._turn = (turn + 1) % len(self._groups)

        def recorded() -> None:
            self.put(unrolls)
            if group.satisfied:
                self._held[turn] = True
                self.loop()
            else:
                self._step()

        self.compute(self.job.rows * self.job.costs.record_row_s, recorded)

    def _step(self) -> None:
        job = self.job
        sleep_s = job.rows * job.costs.env_sleep_s

        def rested() -> None:
            self.worked_s += sleep_s
            self.loop()

        work_s = job.rows * job.costs.env_s * job.jitter()
        self.compute(work_s, lambda: job.clock.after(sleep_s, rested))

    def loaded(self) -> None:
        """Choose actions for held groups with the newer weights, and step them."""
        if not self.job.quota:
            self.loop()
            return
        held = sum(self._held)
        for group in self._groups:
            group.renew()
            if held:
                group.append(self.version)
        self._held = [False] * len(self._groups)
        job, costs = self.job, self.job.costs
        work_s = costs.act_batch_s + held * job.rows * costs.act_row_s if held else 0.0
        work_s += held * job.rows * costs.env_s * job.jitter()
        self.compute(work_s, self.loop)
