"""Inference: wire → inference → unroll; weights → inference. One policy for many actors."""

from __future__ import annotations

import numpy as np
import torch

from hpcrl.brain import Brain
from hpcrl.commands import CommandReceiver
from hpcrl.job import ACTOR_STAGES, INFERENCE_STAGES, Job, full_batch_rows
from hpcrl.link import wait_until
from hpcrl.policy import ActingPolicy
from hpcrl.slots import StepSlots
from hpcrl.stats import StatsReporter
from hpcrl.timing import StageTimer
from hpcrl.unroll_flow import UnrollOutbox
from hpcrl.weights import WeightsSubscriber
from hpcrl.wire import Command


def make_policy(job: Job, brain: Brain, device: torch.device) -> ActingPolicy:
    """Build the policy for all environments of this rank's actors, in slot order."""
    env_ids = np.concatenate([job.env_ids(a) for a in job.topology.actors_of[job.rank]])
    num_envs = len(job.topology.ranks_of("actor")) * job.config.env.envs_per_actor
    return ActingPolicy(
        brain,
        job.env,
        job.unroll,
        job.config.learner.unroll_steps,
        env_ids,
        device,
        job.config.inference.precision,
        job.seed("inference", job.role_index),
        brain.exploration(env_ids, num_envs),
    )


def make_slots(job: Job) -> StepSlots:
    """Post the receives of all clients."""
    clients = job.clients(job.rank)
    rows = len(clients) * job.rows_per_slot
    return StepSlots(
        job.link,
        job.env,
        clients,
        job.rows_per_slot,
        len(ACTOR_STAGES),
        full_batch_rows(job.config, rows),
        job.config.inference.max_wait_s,
    )


def run(job: Job, brain: Brain, device: torch.device) -> None:
    """Serve actions until the learner says STOP."""
    link, learner = job.link, job.topology.learner_of[job.rank]
    policy = make_policy(job, brain, device)
    slots = make_slots(job)
    sources = len(job.topology.clients_of[learner])
    outbox = UnrollOutbox(link, learner, job.unroll, job.credits(sources))
    weights = WeightsSubscriber(link, learner, policy.num_parameters)
    commands = CommandReceiver(link, learner)
    stats = StatsReporter(link, job.root, job.config.metrics.every_s / 2)
    timer = StageTimer(INFERENCE_STAGES)
    waiter = link.waiter(
        lambda: (
            f"{link.label} (rank {link.rank}) waited for "
            + (
                "the first weights"
                if policy.version < 0
                else "credits"
                if outbox.blocked
                else "steps"
            )
            + f"; {slots.num_waiting} of {len(job.clients(job.rank))} slots wait, learner is rank "
            f"{learner}"
        )
    )

    while commands.poll() is not Command.STOP:
        newer = weights.poll()
        if newer is not None:
            policy.load(newer, weights.version)
            weights.renew()
            timer.mark("weights")
        if outbox.blocked:
            outbox.pump()
        if stats.due:
            _report(stats, timer, slots, policy)
        slots.poll()
        if outbox.blocked or policy.version < 0 or not slots.due():
            waiter.idle(job.config.inference.max_wait_s if slots.num_waiting else 1.0)
            timer.mark("blocked" if outbox.blocked else "wait")
            continue
        waiter.progress()
        stats.totals["row_wait_s"] += slots.first_wait_s()
        batch = slots.take()
        rows, places = slots.rows(batch)
        episodes = slots.episodes(batch)
        timer.mark("batch")
        actions = policy.act(rows)
        timer.mark("forward")
        slots.reply(batch, places, actions)
        timer.mark("scatter")
        for unrolls in policy.record():
            stats.totals["unrolls"] += len(unrolls)
            outbox.put(unrolls)
        stats.add_episodes(episodes.returns, episodes.steps, policy.evaluation[episodes.ids])
        stats.totals["batches"] += 1
        stats.totals["rows"] += len(places)
        timer.mark("unroll")

    slots.stop(link)
    outbox.abandon()
    wait_until(lambda: outbox.in_flight == 0, waiter)
    wait_until(stats.sent, waiter)
    _report(stats, timer, slots, policy)
    wait_until(stats.done, waiter)
    commands.say_done()
    # The learner may still be sending weights; it says EXIT when it isn't.
    wait_until(lambda: commands.poll() is Command.EXIT, waiter)
    weights.close()
    commands.close()
    slots.close()


def _report(
    stats: StatsReporter, timer: StageTimer, slots: StepSlots, policy: ActingPolicy
) -> None:
    stats.set_stages("inference", timer.seconds)
    stats.set_stages("actor", dict(zip(ACTOR_STAGES, slots.timers_s().tolist(), strict=True)))
    stats.totals["restarts"] = policy.restarts
    stats.totals["env_steps"] = stats.totals["rows"]
    stats.send()
