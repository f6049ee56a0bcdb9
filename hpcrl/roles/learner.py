"""Learner: unroll → learner → weights. Data-parallel replicas that step together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpcrl.brain import Brain
from hpcrl.comm.agreement import Agreement, Rule
from hpcrl.comm.checkpoint_sharing import share_checkpoint
from hpcrl.comm.commands import CommandSender
from hpcrl.comm.link import Group, wait_until
from hpcrl.comm.rounds import RoundCollector
from hpcrl.comm.stats import StatsCollector
from hpcrl.comm.weights import WeightsPublisher
from hpcrl.comm.wire import Command
from hpcrl.job import LEARNER_STAGES, Job
from hpcrl.learning.backward import NonFiniteLossError
from hpcrl.learning.batches import save_batch
from hpcrl.learning.data_parallel import DataParallel, check_in_sync, make_data_parallel
from hpcrl.learning.epochs import EpochTrainer
from hpcrl.learning.replay_buffer import ReplayBuffer
from hpcrl.learning.sources import OnPolicyQueue, Source
from hpcrl.learning.trainer import StepResult, Trainer
from hpcrl.run.bookkeeping import Bookkeeper
from hpcrl.run.checkpoint import Checkpoint
from hpcrl.run.counters import Counters, RollingReturns
from hpcrl.run.stopping import Outcome, Stop, StopSignal, goal_reached
from hpcrl.timing import StageTimer
from hpcrl.types import UnrollBatch


def make_source(job: Job, brain: Brain) -> Source:
    """Return where the agent's batches come from.

    Raises:
      ValueError: the replay can't hold what it must.
      MemoryError: the replay doesn't fit into memory.
    """
    window = brain.window
    return OnPolicyQueue(job) if window is None else ReplayBuffer(job, window)


class Learner:
    """A learner's parts, assembled; `run` is its loop."""

    def __init__(
        self,
        job: Job,
        brain: Brain,
        device: torch.device,
        group: Group,
        source: Source,
        checkpoint: Checkpoint | None,
    ):
        self.job = job
        self.source = source
        self.group = group
        topology, link = job.topology, job.link
        hosts = [topology.host_of(rank) for rank in topology.learner_ranks]
        self.data_parallel: DataParallel = make_data_parallel(
            job.config.learner.backend,
            group,
            device,
            hosts,
            shared_dir=job.run_dir,
            deadline_s=job.config.transport.deadline_s,
        )
        frame_skip = job.env.frame_skip
        stop = job.config.stop
        total_agent_steps = stop.agent_steps or -(-stop.frames // frame_skip)
        trainer = EpochTrainer if brain.epochs else Trainer
        self.trainer = trainer(
            brain,
            job.config.learner,
            self.data_parallel,
            device,
            total_agent_steps,
            job.config.run.seed,
        )
        self.counters, self.returns = Counters(), RollingReturns()
        self._restore(checkpoint)
        clients = topology.clients_of[job.rank] + topology.evaluators_of[job.rank]
        self.publisher = WeightsPublisher(link, clients, self.trainer.flat.value.numel())
        self.commands = CommandSender(link, clients)
        own: dict[str, Rule] = {"stop": "max", "checkpoint": "max", "checkpoint_open": "max"}
        self.votes = Agreement(group, {**own, **source.rules})
        self.timer = StageTimer(LEARNER_STAGES, pulse=link.pulse, work="forward_backward")
        self.book: Bookkeeper | None = None
        if job.rank == job.root:
            self.book = self._open_book()

    def _open_book(self) -> Bookkeeper:
        job = self.job
        topology = job.topology
        evaluators = topology.ranks_of("evaluator")
        acting_ranks = topology.ranks_of("inference") or topology.ranks_of("worker")
        return Bookkeeper(
            job.config,
            job.topology,
            job.run_dir,
            job.restart,
            self.data_parallel.name,
            self.counters,
            self.returns,
            StatsCollector(job.link, acting_ranks + evaluators),
            RoundCollector(job.link, evaluators, job.config.evaluation.episodes),
            job.link.lost_ranks,
        )

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue from the root's checkpoint, which it alone has read."""
        is_root = self.job.rank == self.job.root
        saved = self.source.saved(checkpoint.step if checkpoint else 0) if is_root else None
        shared = share_checkpoint(self.group, is_root, checkpoint, {"source": saved})
        if shared is None:
            return
        data, tensors = shared
        self.trainer.load_state(tensors)
        self.counters = Counters.from_dict(data["counters"])
        self.returns = RollingReturns.from_list(data["returns"])
        if data["source"] is not None:
            self.source.restore(data["source"])

    def vote(self, stop: Stop) -> None:
        """Cast this learner's vote on what all do next."""
        book = self.book
        self.votes.start(
            {
                "stop": stop,
                "checkpoint": book is not None and book.checkpoint_due(),
                "checkpoint_open": book is not None and book.checkpoint_open,
                **self.source.vote(),
            }
        )

    def checkpoint(self) -> None:
        """Begin to write a checkpoint beside training; all learners call it in the same step."""
        if self.book:
            self.book.checkpoint(self.state, {"restart": self.job.restart})
        self.source.begin_save(self.counters.learner_steps)

    def serve(self) -> bool:
        """Do all that must go on while this rank waits; return whether unrolls arrived."""
        if self.job.link.lost_ranks.issuperset(self.job.topology.clients_of[self.job.rank]):
            raise RuntimeError(
                f"all workers of {self.job.link.label} have died: nobody acts for it"
            )
        self.source.version = self.counters.learner_steps
        arrived = self.source.serve()
        counters = self.counters
        self.publisher.serve(self.trainer.parameters, counters.learner_steps, counters.frames)
        if self.book:
            self.book.poll()
        return arrived

    def poll_last(self) -> None:
        """Take in what acting ranks still report while all ranks finish."""
        if self.book:
            self.book.poll()

    def state(self) -> Mapping[str, Any]:
        """Copies of what a checkpoint holds."""
        return self.trainer.state()


def run(learner: Learner, stop_signal: StopSignal) -> Outcome:
    """Train until the learners agree to stop; then checkpoint, drain and report."""
    job, timer, book, counters = learner.job, learner.timer, learner.book, learner.counters
    source, frame_skip = learner.source, job.env.frame_skip
    check_every = job.config.learner.check_parameters_every
    waiter = job.link.waiter(
        lambda: (
            f"{job.link.label} (rank {job.rank}) waited for a batch; it {source.status()}; its "
            f"unrolls come from ranks {list(job.topology.clients_of[job.rank])}"
            + ("; then for the other learners' votes" if voted else "")
        )
    )
    voted, reason = False, ""
    while True:
        if learner.serve():
            waiter.progress()  # a replay may take longer to fill than a healthy peer may be silent
        paused = _paused(learner)
        if paused:
            waiter.progress()
        if not voted and (not paused or stop_signal.reason):
            goal = goal_reached(job.config.stop, counters, learner.returns if book else None)
            vote = Stop.GOAL if goal else Stop.REQUEUE if stop_signal.reason else Stop.NO
            reason = goal or stop_signal.reason or reason
            if vote is not Stop.NO or source.ready():
                learner.vote(vote)
                voted = True
        outcome = learner.votes.poll()
        if outcome is None:
            waiter.idle()
            timer.mark("wait")
            continue
        voted, stop = False, Stop(int(outcome["stop"]))
        if stop is not Stop.NO:
            break
        if not source.agree(outcome, not outcome["checkpoint_open"]):
            if source.ready():
                waiter.progress()  # those that it waits for live
            continue
        waiter.progress()
        timer.mark("wait")
        taken = source.take(outcome)
        timer.mark("batch")
        result = _step(learner, taken.batch)
        source.feedback(result)
        num_steps = result.num_steps if taken.num_steps is None else taken.num_steps
        counters.learner_steps += 1
        counters.agent_steps += num_steps
        counters.frames += num_steps * frame_skip
        counters.stale_unrolls_dropped += taken.stale_unrolls
        learner.serve()
        timer.mark("publish")
        if check_every and counters.learner_steps % check_every == 0:
            check_in_sync(learner.group, learner.trainer.flat.value, counters.learner_steps)
        if book:
            book.note_step({**result.values, **taken.values})
            book.report_when_due(timer.seconds)
        if outcome["checkpoint"]:
            learner.checkpoint()
    if stop is Stop.REQUEUE:
        reason = reason or stop_signal.reason or ""  # another learner's vote came before the signal
    _shut_down(learner, stop, reason)
    return Outcome(stop, reason)


def _paused(learner: Learner) -> bool:
    """Whether this learner casts no vote before a checkpoint is written; tries to write it."""
    book = learner.book
    if book is None or not book.paused():
        return False
    if book.checkpoint_due():
        book.checkpoint(learner.state, {"restart": learner.job.restart})
    return True


def _step(learner: Learner, batch: UnrollBatch) -> StepResult:
    counters, trainer = learner.counters, learner.trainer
    try:
        return trainer.step(batch, counters.learner_steps, counters.agent_steps, learner.timer)
    except NonFiniteLossError:
        save_batch(learner.job.run_dir / f"nan_batch_rank{learner.job.rank}.npz", batch)
        # All learners are here; the first to leave ends the job.
        learner.group.barrier()
        raise


def _shut_down(learner: Learner, stop: Stop, reason: str) -> None:
    """Checkpoint first, as nothing on its way belongs to it; then drain the cell."""
    book, link = learner.book, learner.job.link
    if book:
        book.stopping()
        book.freeze()
        book.last_checkpoint(learner.state, {"restart": learner.job.restart}, link.pulse.beat)
    learner.commands.send(Command.STOP)

    def drain() -> None:
        learner.source.discard()
        if book:
            book.poll()

    learner.commands.await_done(drain)
    learner.source.save(learner.counters.learner_steps, learner.group)
    waiter = link.waiter(lambda: f"{link.label} waited for its last weights to leave")
    wait_until(learner.publisher.idle, waiter)
    learner.commands.send(Command.EXIT)
    learner.data_parallel.close()


def close(learner: Learner, outcome: Outcome) -> None:
    """Write the last record and withdraw all receives, once every rank has finished."""
    if learner.book:
        reason = outcome.reason or "another learner asked for it"
        learner.book.close(outcome.state, reason, learner.timer.seconds)
    learner.source.close()
    learner.publisher.close()
    learner.commands.close()
