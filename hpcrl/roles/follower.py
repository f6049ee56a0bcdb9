"""Follower: leader's order → env. Steps its part of environments that span several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from env_wrappers import EnvBatch
from hpcrl.comm.team import Order, Team
from hpcrl.job import Job
from hpcrl.timing import StageTimer


def run(job: Job, groups: Sequence[EnvBatch], team: Team) -> None:
    """Do what the leader does, until it has closed all groups."""
    layout = team.order_layout(job.rows_per_slot, job.env.action)
    timer = StageTimer(("wait", "step"), pulse=job.link.pulse, work="step")
    live = set(range(len(groups)))
    while live:
        order = layout.views(team.share(None))
        timer.mark("wait")
        index = int(order["group"])
        envs = groups[index]
        if order["order"] == Order.CLOSE:
            envs.close()
            live.remove(index)
            continue
        batch = envs.reset() if order["order"] == Order.RESET else envs.step(order["action"])
        timer.mark("step")
        team.check_agreed(envs.spec["name"], batch)
