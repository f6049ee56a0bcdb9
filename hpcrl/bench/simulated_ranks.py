"""What all simulated ranks share, and what those that send unrolls to a learner do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcrl.node.node_facts import NICENESS
from hpcrl.timing import backoff_sleep_s

if TYPE_CHECKING:
    from hpcrl.bench.simulator import SimulatedJob


class Rank:
    """A rank's core and device, how long it waits, and how long it worked."""

    def __init__(self, job: SimulatedJob, rank: int):
        self.job = job
        self.rank = rank
        self.node = job.topology.node_of[rank]
        self.cores = job.cores_of[self.node]
        role = job.topology.role_of[rank]
        self._nice = NICENESS[role] if job.crowded[self.node] else 0
        device = job.topology.device_of[rank]
        self._device = None if device is None else job.gpu(self.node, device)
        self._idle_since: float | None = None
        self._waking = False
        self.worked_s = 0.0

    def compute(self, work_s: float, done: Callable[[], None], on_device: bool = False) -> None:
        """Call `done` after work on this rank's core, or on its GPU if it has one."""
        start_s = self.job.clock.now

        def finish() -> None:
            self.worked_s += self.job.clock.now - max(start_s, self.job.steady_s)
            done()

        if on_device and self._device is not None:
            self._device.compute(work_s, finish)
        else:
            self.cores.compute(work_s, finish, self._nice)

    def idle(self) -> None:
        """Begin to wait."""
        if self._idle_since is None:
            self._idle_since = self.job.clock.now
            self.cores.waiting += 1

    def wake(self, act: Callable[[], None], at_most_s: float = math.inf) -> None:
        """Call `act` when this rank looks for messages again, if it waits."""
        if self._idle_since is None or self._waking:
            return
        self._waking = True
        delay_s = 0.0
        if self.job.sleeps[self.node]:
            waited_s = self.job.clock.now - self._idle_since
            delay_s = self.job.random.random() * min(backoff_sleep_s(waited_s), at_most_s)

        def awake() -> None:
            self._waking = False
            self._idle_since = None
            self.cores.waiting -= 1
            act()

        self.job.clock.after(delay_s, awake)


class Source(Rank, ABC):
    """What an inference rank and a worker share: unrolls with credits, and weights."""

    def __init__(self, job: SimulatedJob, rank: int, learner: Learner):
        super().__init__(job, rank)
        self.learner = learner
        self.version = 0
        self.newer: int | None = None
        self._pending: deque[float] = deque()
        self._in_flight = 0

    def put(self, unrolls: list[float]) -> None:
        """Queue complete unrolls, each by its mean version, and send what credits allow."""
        self._pending.extend(unrolls)
        self.pump()

    def pump(self) -> None:
        """Send what credits allow."""
        job = self.job
        while self._pending and self._in_flight < job.credits:
            self._in_flight += 1
            learner, version = self.learner, self._pending.popleft()
            nbytes = job.costs.unroll_bytes * job.share.thinning
            job.send(self, learner, nbytes, learner.arrive, self, version)

    @property
    def acting(self) -> list[Rank]:
        """The ranks that step its environments."""
        return [self]

    @property
    def blocked(self) -> bool:
        """Whether unrolls wait for credits."""
        return bool(self._pending)

    def matched(self) -> None:
        """The learner has taken an unroll in."""
        self._in_flight -= 1
        self.pump()
        if not self.blocked:
            self.wake(self.loop)

    def offer(self, version: int) -> None:
        """Newer weights have arrived."""
        self.newer = version
        self.wake(self.loop)

    def load(self) -> None:
        """Take over newer weights, ask for the next, and go on."""
        newer = self.newer
        if newer is None:
            raise RuntimeError("there are no newer weights")
        self.version, self.newer = newer, None
        self.learner.ask(self)
        self.compute(self.job.costs.weights_s, self.loaded)

    def loaded(self) -> None:
        """Go on with newer weights."""
        self.loop()

    @abstractmethod
    def loop(self) -> None:
        """Go on after a wait."""


class Learner(Rank):
    """Takes unrolls into its slots, and steps when all learners have a batch."""

    def __init__(self, job: SimulatedJob, rank: int):
        super().__init__(job, rank)
        self.version = 0
        self._arrived: deque[tuple[Source, float]] = deque()
        self._full: deque[tuple[Source, float]] = deque()
        self._filled: Counter[int] = Counter()
        self._asking: list[Source] = []
        self._credit = 0.0
        self._owed = 0.0
        self._voted = False
        self._agreed = False

    def arrive(self, source: Source, version: float) -> None:
        """An unroll wants to be received; while the learner computes, MPI stands still."""
        self._arrived.append((source, version))
        self.wake(self.loop)

    def ask(self, source: Source) -> None:
        """A source asks for anything newer than it has."""
        self._asking.append(source)
        self.wake(self.loop)

    def _serve(self) -> None:
        job = self.job
        waiting: deque[tuple[Source, float]] = deque()
        while self._arrived:
            source, version = self._arrived.popleft()
            if job.ratio_items:
                if self._credit >= 2 * job.batch:
                    waiting.append((source, version))
                    continue
                self._credit += job.ratio_items
                job.count_trained(1.0)
            elif self._filled[source.rank] < job.slots:
                self._filled[source.rank] += 1
                self._full.append((source, version))
            else:
                waiting.append((source, version))
                continue
            source.matched()
        self._arrived = waiting
        for source in [s for s in self._asking if s.version < self.version]:
            self._asking.remove(source)
            nbytes = job.costs.weights_bytes * job.share.thinning
            job.send(self, source, nbytes, source.offer, self.version)

    def _ready(self) -> bool:
        if self.job.ratio_items:
            return self._credit >= self.job.batch
        return len(self._full) >= int(self._owed + self.job.batch)

    def loop(self) -> None:
        """Serve messages; take the batch that was voted for, vote once one is there, or wait."""
        if self._agreed:
            self._agreed = False
            self._take()
            return
        self._serve()
        self.idle()
        if self._ready() and not self._voted:
            self._voted = True
            self.job.vote(self)

    def step(self) -> None:
        """All learners have a batch: take it."""
        self._agreed = True
        self.wake(self.loop)

    def _take(self) -> None:
        job = self.job
        self._voted = False
        if job.ratio_items:
            self._credit -= job.batch
        else:
            self._owed += job.batch
            taken = [self._full.popleft() for _ in range(int(self._owed))]
            self._owed -= len(taken)
            for source, version in taken:
                self._filled[source.rank] -= 1
                job.count_lag(self.version - version)
            job.count_trained(float(len(taken)))

        def assembled() -> None:
            self.compute(job.costs.train_s, lambda: job.reduce(self), on_device=True)

        self.compute(job.costs.assemble_s, assembled)

    def reduced(self) -> None:
        """All learners have summed their gradients: publish and go on."""
        self.version += 1
        self.loop()
