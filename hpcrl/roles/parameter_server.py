"""Parameter server: gradient → shard of the parameters → worker. No server waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.brain import Brain
from hpcrl.comm.checkpoint_sharing import share_checkpoint
from hpcrl.comm.commands import CommandReceiver, CommandSender, StopRequester, StopRequests
from hpcrl.comm.gradient_flow import Arrived, Fate, GradientInbox
from hpcrl.comm.link import Group, wait_until
from hpcrl.comm.rounds import RoundCollector
from hpcrl.comm.shard_states import ShardCollector, ShardReporter
from hpcrl.comm.stats import StatsCollector
from hpcrl.comm.wire import Command, Layout, shard_state_layout
from hpcrl.job import SERVER_STAGES, Job, max_gradient_lag
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.shards import MODEL, Shard, Taken, cut, join
from hpcrl.run.bookkeeping import Bookkeeper
from hpcrl.run.checkpoint import Checkpoint
from hpcrl.run.counters import Counters, RollingReturns
from hpcrl.run.stopping import Outcome, Stop, StopSignal, goal_reached
from hpcrl.timing import StageTimer


class ParameterServer:
    """What every server has: a shard, the gradients that come for it, and its timer."""

    def __init__(self, job: Job, brain: Brain, group: Group, checkpoint: Checkpoint | None):
        self.job, self.group = job, group
        config, topology = job.config, job.topology
        self.whole = FlatParameters(brain.make_network(config.run.seed))
        first, last = job.shards[job.role_index]
        stop = config.stop
        self.shard = Shard(
            self.whole.value[first:last],
            config.learner.optimizer,
            stop.agent_steps or -(-stop.frames // job.env.frame_skip),
            max_gradient_lag(config, topology),
        )
        self.counters, self.returns = Counters(), RollingReturns()
        self._restore(checkpoint)
        self.workers = topology.ranks_of("worker")
        own = job.gradients[job.role_index], job.parameters[job.role_index]
        self.inbox = GradientInbox(job.link, self.workers, *own)
        self.timer = StageTimer(SERVER_STAGES, pulse=job.link.pulse)
        self.root = Root(self, brain) if job.rank == job.root else None
        self.member = None if self.root else Member(self)
        self.book = self.root.book if self.root else None

    def state_layout(self, index: int) -> Layout:
        """Return the message that holds the state of the shard of server `index`."""
        first, last = self.job.shards[index]
        return shard_state_layout(last - first, (MODEL, *self.shard.moments))

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue from the root's checkpoint, which it alone has read."""
        shared = share_checkpoint(self.group, self.job.rank == self.job.root, checkpoint, {})
        if shared is None:
            return
        data, arrays = shared
        self.counters = Counters.from_dict(data["counters"])
        self.returns = RollingReturns.from_list(data["returns"])
        bounds, version = self.job.shards[self.job.role_index], self.counters.learner_steps
        self.shard.load_state(cut(self.whole, arrays, data, bounds, version))

    def serve(self, *, apply: bool = True) -> bool:
        """Answer the gradients that have arrived; return whether there were any.

        Args:
          apply: if not, they are thrown away.
        """
        arrived = self.inbox.poll()
        self.timer.mark("wait")
        for index in arrived:
            gradient = self.inbox.arrived(index)
            taken = Taken(False, 0)
            if apply and gradient.num_steps:
                counters = self.counters
                steps = counters.agent_steps
                taken = self.shard.take(gradient.gradient, gradient.version, steps)
                if taken.applied:
                    counters.learner_steps += 1
                    counters.agent_steps += gradient.num_steps
                    counters.frames += gradient.num_steps * self.job.env.frame_skip
                self.timer.mark("optimizer")
                if self.root:
                    self.root.note(gradient, taken, self.shard.learning_rate(steps))
            shard = self.shard
            self.inbox.answer(index, shard.parameters, shard.version, taken.lag, taken.applied)
            self.timer.mark("publish")
        return bool(arrived)

    def poll_last(self) -> None:
        """Take in what workers still report while all ranks finish."""
        if self.book:
            self.book.poll()


class Root:
    """What server 0 has besides: the run's books, all checkpoints, and the last word."""

    def __init__(self, server: ParameterServer, brain: Brain):
        self._server, self._brain = server, brain
        job, link = server.job, server.job.link
        others = job.topology.learner_ranks[1:]
        self.book = Bookkeeper(
            job.config,
            job.topology,
            job.run_dir,
            job.restart,
            "asynchronous",
            server.counters,
            server.returns,
            StatsCollector(link, server.workers),
            RoundCollector(link, (), job.config.evaluation.episodes),
            link.lost_ranks,
        )
        self.workers = CommandSender(link, server.workers)
        self.servers = CommandSender(link, others)
        self._wishes = StopRequests(link, others)
        layouts = [server.state_layout(1 + index) for index in range(len(others))]
        self._shards = ShardCollector(link, others, layouts)
        self._collecting = False
        self._fates: list[Fate] = []

    def note(self, gradient: Arrived, taken: Taken, learning_rate: float) -> None:
        """Note what a gradient brought, and what became of the one before it."""
        if gradient.previous.applied:
            self._fates.append(gradient.previous)
        if not taken.applied:
            return
        values = self._brain.summarize(gradient.metrics, gradient.num_steps)
        # Lags on other servers' shards come with a worker's next gradient.
        fates = [*self._fates, Fate(1, 0, taken.lag, taken.lag)]
        known = self._fates or fates
        self._fates = []
        self.book.note_step(
            {
                **values,
                **gradient.figures,
                "learning_rate": learning_rate,
                "policy_lag": taken.lag,
                "policy_lag_max": taken.lag,
                "gradient_lag": sum(f.lag_sum for f in known) / sum(f.applied for f in known),
                "gradient_lag_max": max(fate.lag_max for fate in fates),
            }
        )

    def decide(self, stop_signal: StopSignal) -> Outcome | None:
        """Return how the run ends, None while it goes on."""
        server = self._server
        goal = goal_reached(server.job.config.stop, server.counters, server.returns)
        if goal:
            return Outcome(Stop.GOAL, goal)
        asking = self._wishes.poll()
        if stop_signal.reason:
            return Outcome(Stop.REQUEUE, stop_signal.reason)
        return Outcome(Stop.REQUEUE, f"learner rank {asking[0]} asked for it") if asking else None

    def keep_books(self) -> None:
        """Report and checkpoint at their intervals, beside the gradients."""
        server, book = self._server, self.book
        book.poll()
        if server.job.link.lost_ranks.issuperset(server.workers):
            raise RuntimeError("all workers have died: nobody acts any more")
        book.report_when_due(server.timer.seconds)
        if book.checkpoint_due() and not self._collecting:
            self._collect()
        if self._collecting and self._shards.poll():
            self._collecting = False
            book.checkpoint(*self._checkpoint())

    def _collect(self) -> None:
        """Ask the other servers for their shards."""
        self._collecting = True
        self._shards.begin()
        self.servers.send(Command.COLLECT)

    def _checkpoint(self) -> tuple[Any, dict[str, Any]]:
        """Return what `Bookkeeper.checkpoint` takes: all shards as one network.

        Each is whole, between two gradients. Two shards may differ by the gradients that are under
        way, as they do in any worker's copy.
        """
        server = self._server
        states = [server.shard.state(), *self._shards.states()]
        tensors, records = join(server.whole, states, server.job.shards)

        def snapshot() -> Mapping[str, Any]:
            return tensors

        return snapshot, {"restart": server.job.restart, **records}

    def shut_down(self) -> None:
        """Checkpoint first; then the workers leave, then the other servers."""
        server, book, link = self._server, self.book, self._server.job.link
        book.stopping()
        book.freeze()
        if not self._collecting:
            self._collect()
        waiter = link.waiter(
            lambda: f"{link.label} waited for the shards of ranks {self._shards.waits_for()}"
        )
        wait_until(self._shards.poll, waiter)
        book.last_checkpoint(*self._checkpoint())

        def drain() -> None:
            server.serve(apply=False)
            book.poll()

        self.workers.send(Command.STOP)
        self.workers.await_done(drain)
        self.servers.send(Command.STOP)
        self.servers.await_done(book.poll)
        waiter = link.waiter(lambda: f"{link.label} waited for its last parameters to leave")
        wait_until(server.inbox.idle, waiter)
        self.workers.send(Command.EXIT)
        self.servers.send(Command.EXIT)

    def close(self, outcome: Outcome) -> None:
        """Write the last record and withdraw all receives."""
        self.book.close(outcome.state, outcome.reason, self._server.timer.seconds)
        for part in (self.workers, self.servers, self._wishes, self._shards):
            part.close()


class Member:
    """What every other server has: the root's orders, and its own wish to stop."""

    def __init__(self, server: ParameterServer):
        self._server = server
        job = server.job
        self._commands = CommandReceiver(job.link, job.root)
        self._stop = StopRequester(job.link, job.root)
        self._shards = ShardReporter(job.link, job.root, server.state_layout(job.role_index))

    def decide(self, stop_signal: StopSignal) -> Outcome | None:
        """Do what the root asks; return an outcome when it says STOP."""
        if stop_signal.reason:
            self._stop.ask()
        command = self._commands.poll()
        if command is Command.COLLECT:
            self._shards.send(self._server.shard.state())
        # How the run ends only the root knows; the greatest code of all ranks counts.
        return Outcome(Stop.GOAL, "") if command is Command.STOP else None

    def shut_down(self) -> None:
        """Leave when the root says EXIT; no worker sends anything any more."""
        server, link = self._server, self._server.job.link
        waiter = link.waiter(lambda: f"{link.label} waited for the root learner to end the run")
        wait_until(lambda: server.inbox.idle() and self._shards.sent(), waiter)
        self._commands.say_done()
        wait_until(lambda: self._commands.poll() is Command.EXIT, waiter)

    def close(self) -> None:
        """Withdraw the posted receive."""
        self._commands.close()


def run(server: ParameterServer, stop_signal: StopSignal) -> Outcome:
    """Apply gradients and answer them until the root ends the run."""
    job, timer, root = server.job, server.timer, server.root
    waiter = job.link.waiter(
        lambda: (
            f"{job.link.label} (rank {job.rank}) waited for a gradient of any of the worker ranks "
            f"{list(server.workers)}"
        )
    )
    deciding = root or server.member
    assert deciding is not None
    timer.mark("wait")
    while (outcome := deciding.decide(stop_signal)) is None:
        if root:
            root.keep_books()
            if root.book.paused():  # the workers wait for their answers meanwhile
                waiter.progress()
                waiter.idle()
                timer.mark("wait")
                continue
        if server.serve():
            waiter.progress()
        else:
            waiter.idle()
            timer.mark("wait")
    if root:
        root.shut_down()
    elif server.member:
        server.member.shut_down()
    return outcome


def close(server: ParameterServer, outcome: Outcome) -> None:
    """Write the last record and withdraw all receives, once every rank has finished."""
    if server.root:
        server.root.close(outcome)
    elif server.member:
        server.member.close()
    server.inbox.close()
