"""Worker: env → inference → unroll in one rank; steps its groups of environments in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from env_wrappers import EnvBatch
from hpcrl.acting.acting_rank import LearnerPort, make_policy
from hpcrl.acting.local_group import LocalGroups
from hpcrl.acting.pacing import PacedPolicy
from hpcrl.acting.policy import ActingPolicy
from hpcrl.brain import Brain
from hpcrl.job import INFERENCE_STAGES, Job
from hpcrl.timing import StageTimer


def run(job: Job, brain: Brain, device: torch.device, groups: Sequence[EnvBatch]) -> None:
    """Act until the learner says STOP."""
    policy = make_policy(job, brain, device, job.env_ids(job.rank))
    paced = policy if isinstance(policy, PacedPolicy) else None
    port = LearnerPort(job, policy)
    timer = StageTimer(("step", *INFERENCE_STAGES), pulse=job.link.pulse, work="step")
    local = LocalGroups(job, groups, port.stats, timer, policy.evaluation)
    timer.mark("step")
    waiter = job.link.waiter(
        lambda: (
            f"{job.link.label} (rank {job.rank}) waited for {port.need()}; its learner is rank "
            f"{port.learner}"
        )
    )
    at_boundary = True
    measures_only = bool(policy.evaluation.all())  # then no unroll ever ends here
    while not port.stopped():
        # Weights change where unrolls end, so that few of them are acted by two versions.
        if at_boundary and port.load_newer():
            timer.mark("weights")
            if paced:
                local.resume(paced)
        port.outbox.pump()
        if port.stats.due:
            _report(port, policy, local, timer)
        all_held = local.all_held
        if port.outbox.blocked or policy.version < 0 or all_held:
            waiter.idle()
            timer.mark("blocked" if port.outbox.blocked else "held" if all_held else "wait")
            continue
        group = local.next()
        if group.held:
            continue
        waiter.progress()
        waiting = group.rows()
        timer.mark("batch")
        actions = policy.act(waiting)
        timer.mark("forward")
        complete = policy.record()
        port.send(complete)
        waits = paced is not None and bool(paced.satisfied.any())
        at_boundary = bool(complete) or waits or measures_only
        port.stats.totals["batches"] += 1
        port.stats.totals["rows"] += len(waiting.ids)
        timer.mark("unroll")
        if paced and paced.satisfied[group.ids].all():
            paced.hold(group.ids)
            group.held = True
            continue
        local.step(group, waiting.ids, actions)

    port.finish(lambda: _report(port, policy, local, timer), waiter)
    local.close()


def _report(port: LearnerPort, policy: ActingPolicy, local: LocalGroups, timer: StageTimer) -> None:
    seconds = dict(timer.seconds)
    port.stats.set_stages("actor", {"step": seconds.pop("step")})
    port.stats.set_stages("inference", seconds)
    local.note(policy)
    port.report()
