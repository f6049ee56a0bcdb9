"""Ranks of `hpcrl bench learner`: a learner that runs the role's own loop, and floods of unrolls.

The learner's clients (workers or, with a replay, an inference rank) send the same unroll again and
again and take whatever weights are newer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hpcrl.agents import ReplayWindow
from hpcrl.bench.costs import noise
from hpcrl.bench.ranks import read_arguments, write_result
from hpcrl.bench.seat import take_seat
from hpcrl.brain import Brain, autocast
from hpcrl.comm.commands import CommandReceiver
from hpcrl.comm.link import wait_until
from hpcrl.comm.startup import gather_json
from hpcrl.comm.unroll_flow import UnrollOutbox
from hpcrl.comm.weights import WeightsSubscriber
from hpcrl.comm.wire import Command
from hpcrl.job import Job
from hpcrl.learning.batches import columns
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.replay_buffer import ReplayBuffer
from hpcrl.learning.sources import OnPolicyQueue, Taken
from hpcrl.roles import learner as learners
from hpcrl.run.run_dir import RunDir
from hpcrl.run.stopping import StopSignal
from hpcrl.types import UnrollBatch

_WARM_UP_STEPS = 5


class Notes:
    """When each batch was taken, and the last of them."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []
        self.last: Taken | None = None

    def keep(self, taken: Taken) -> Taken:
        """Note a batch, whose taking began now and here."""
        self.last = taken
        return taken

    def begin(self) -> None:
        """Note that a batch is being taken."""
        self.taken_s.append(time.perf_counter())


class ObservedQueue(OnPolicyQueue):
    """A queue that notes when each batch is taken, and keeps one."""

    def __init__(self, job: Job):
        super().__init__(job)
        self.notes = Notes()

    def take(self, agreed: Mapping[str, float]) -> Taken:
        """Return the oldest unrolls."""
        self.notes.begin()
        return self.notes.keep(super().take(agreed))


class ObservedReplay(ReplayBuffer):
    """A replay that does the same."""

    def __init__(self, job: Job, window: ReplayWindow):
        super().__init__(job, window)
        self.notes = Notes()

    def take(self, agreed: Mapping[str, float]) -> Taken:
        """Return the drawn items."""
        self.notes.begin()
        return self.notes.keep(super().take(agreed))


class ObservedLearner(learners.Learner):
    """A learner that notes at which steps it was copied for a checkpoint."""

    copied_at: tuple[int, ...] = ()

    def state(self) -> Mapping[str, Any]:
        """Copies of what a checkpoint holds."""
        self.copied_at = (*self.copied_at, self.counters.learner_steps)
        return super().state()


def learn(job: Job, brain: Brain, seconds: float) -> dict[str, Any]:
    """Run the learner role, and the bare loop before and after it."""
    device = torch.device("cpu")
    group = job.link.group(job.topology.learner_ranks)
    if group is None:
        raise RuntimeError("a learner belongs to the learners' group")
    if job.rank == job.root:
        RunDir(job.run_dir).path.mkdir(parents=True, exist_ok=True)
    job.world.barrier()
    window = brain.window
    source = ObservedReplay(job, window) if window else ObservedQueue(job)
    learner = ObservedLearner(job, brain, device, group, source, None)
    outcome = learners.run(learner, StopSignal())
    leave(job, learner.poll_last)
    learners.close(learner, outcome)
    if source.notes.last is None:
        raise RuntimeError("the learner took no batch")
    steps_s = np.diff(source.notes.taken_s)[_WARM_UP_STEPS:]
    copied = [step - 1 - _WARM_UP_STEPS for step in learner.copied_at]
    plain = np.array([s for i, s in enumerate(steps_s) if i not in copied])
    with_copy = [float(steps_s[i]) for i in copied if 0 <= i < len(steps_s)]
    step_s = float(np.median(plain))
    bare_s = bare_loop(job, brain, source.notes.last.batch, seconds / 4)
    stages = learner.timer.seconds
    return {
        "backend": learner.data_parallel.name,
        "steps_per_s": 1 / step_s,
        "bare_steps_per_s": 1 / bare_s,
        "ratio": bare_s / step_s,
        "publish_share": stages["publish"] / (sum(stages.values()) - stages["wait"]),
        "checkpoint_stall_steps": (float(np.median(with_copy)) - step_s) / step_s
        if with_copy
        else None,
        "checkpoints": len(with_copy),
        "step_ms": 1e3 * step_s,
        "agent": job.config.agent.name,
        "parameters": learner.trainer.flat.value.numel(),
        "stages": {name: total / sum(stages.values()) for name, total in stages.items()},
    }


def bare_loop(job: Job, brain: Brain, batch: UnrollBatch, seconds: float) -> float:
    """Seconds of a step that has its batch at hand and uses torch's own optimizer.

    An agent of epochs takes them all, over parts of the batch in order.
    """
    config = job.config.learner
    network = brain.make_network(0).train()
    target = brain.make_network(0).requires_grad_(False) if brain.target_update_steps else None
    optimizer = torch.optim.Adam(network.parameters(), config.optimizer.learning_rate)
    generator = torch.Generator().manual_seed(0)

    def update(piece: UnrollBatch) -> None:
        optimizer.zero_grad()
        with autocast(config.precision, torch.device("cpu")):
            out = brain.loss(network, piece, generator, target)
        (out.loss_sum / out.count).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()

    def step() -> None:
        if brain.epochs is None:
            update(batch)
            return
        epochs, minibatches, _ = brain.epochs
        prepared = brain.prepare(batch)
        for chosen in np.array_split(np.arange(prepared.reward.shape[1]), minibatches) * epochs:
            update(columns(prepared, torch.from_numpy(chosen)))

    return median_s(step, seconds)


def median_s(call: Callable[[], None], seconds: float) -> float:
    """Return the median time of a call."""
    call()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return float(np.median(times))


def flood(job: Job) -> dict[str, Any]:
    """Send unrolls as fast as the learner takes them, until it says STOP."""
    learner = job.topology.learner_of[job.rank]
    job.link.group(job.topology.learner_ranks)
    job.world.barrier()
    unroll = job.unroll.buffer(1)
    for name, view in job.unroll.views(unroll).items():
        if name.startswith(("obs:", "prefix:")):
            view[...] = noise(view.shape, view.dtype.name)
        elif name == "priority":
            view[...] = 1.0
    sources = len(job.topology.clients_of[learner])
    outbox = UnrollOutbox(job.link, learner, job.unroll, job.credits(sources))
    version = job.unroll.views(unroll)["policy_version"]
    index = job.unroll.views(unroll)["unroll_index"]
    network = Brain(job.config, job.env).make_network(0)
    weights = WeightsSubscriber(job.link, learner, FlatParameters(network).value.numel())
    commands = CommandReceiver(job.link, learner)
    waiter = job.link.waiter(lambda: f"{job.link.label} waited for credits")
    received = 0
    while commands.poll() is not Command.STOP:
        if weights.poll() is not None:
            version[...] = weights.version
            weights.renew()
            received += 1
        if outbox.blocked:
            outbox.pump()
            waiter.idle()
            continue
        waiter.progress()
        outbox.put(unroll.copy())
        index += 1
    outbox.abandon()
    wait_until(lambda: outbox.in_flight == 0, waiter)
    commands.say_done()
    wait_until(lambda: commands.poll() is Command.EXIT, waiter)
    weights.close()
    commands.close()
    leave(job, lambda: None)
    return {"copies_received": received}


def attend(job: Job) -> None:
    """Take part in what all ranks do, as an actor whose environments nobody steps."""
    job.link.group(job.topology.learner_ranks)
    job.world.barrier()
    leave(job, lambda: None)


def leave(job: Job, serve: Callable[[], None]) -> None:
    """Collective: wait until every rank has finished."""
    gathering = job.world.start_allgather(np.zeros(1, np.int64))
    waiter = job.link.waiter(lambda: f"{job.link.label} waited for the end of all other ranks")
    while not gathering.done():
        serve()
        waiter.idle()


def main() -> None:
    """Play this rank's part."""
    arguments = read_arguments()
    job, brain = take_seat(arguments["config"], arguments["run_dir"])
    if job.topology.role_of[job.rank] == "learner":
        found = learn(job, brain, arguments["seconds"])
    elif job.rank in job.topology.learner_of:
        found = flood(job)
    else:
        found = {}
        attend(job)
    parts = gather_json(job.world, found)
    if job.rank == 0:
        learners_found = [part for part in parts if "ratio" in part]
        copies = sum(part.get("copies_received", 0) for part in parts)
        write_result(arguments, {"learners": learners_found, "copies_received": copies})


if __name__ == "__main__":
    main()
