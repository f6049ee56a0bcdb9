"""Actor: env → wire. Steps its groups of environments in turn; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from env_wrappers import EnvBatch, StepBatch
from hpcrl.acting.env_batches import make_batch
from hpcrl.comm.link import Incoming, Link, Sender, wait_until
from hpcrl.comm.packing import make_outgoing
from hpcrl.comm.team import LedBatch
from hpcrl.comm.wire import Command, Tag, reply_layout, step_layout, step_short_nbytes
from hpcrl.job import ACTOR_STAGES, Job, Seat
from hpcrl.specs import ENV_FAILURES, EnvSpec
from hpcrl.timing import StageTimer


def make_groups(seat: Seat) -> list[EnvBatch]:
    """Build this actor's environments, one batch per group, with seeds of their own.

    A follower builds its part of its leader's.
    """
    config, rows, team = seat.config.env, seat.rows_per_slot, seat.team
    env_ids = seat.env_ids(seat.topology.leader_of(seat.rank))
    seeds = [seat.seed("env", int(env_id)) % 2**31 for env_id in env_ids]
    shares = [seeds[g * rows : (g + 1) * rows] for g in range(config.groups)]
    if team is None:
        return [make_batch(config, rows, share) for share in shares]
    parts = [make_batch(config, rows, s, communicator=team.env_communicator) for s in shares]
    if not team.leads:
        return parts
    return [LedBatch(envs, team, group) for group, envs in enumerate(parts)]


class GroupChannel:
    """One group's step message, its reply, and the run ids of its environments."""

    def __init__(
        self,
        link: Link,
        env: EnvSpec,
        inference: int,
        group: int,
        rows: int,
        restart: int,
        compression: str = "none",
    ):
        layout, reply = step_layout(env, rows, len(ACTOR_STAGES)), reply_layout(env, rows)
        plane = link.plane("steps")
        buffer, reply_buffer = layout.buffer(), reply.buffer()
        self._step = layout.views(buffer)
        self._reply = reply.views(reply_buffer)
        self._paths = tuple(env.observation)
        self._full_nbytes = layout.nbytes
        self._short_nbytes = step_short_nbytes(env, layout)
        if self._full_nbytes > link.max_message_bytes:
            self._short_nbytes = self._full_nbytes  # both ends must split a message alike
        lengths = (self._short_nbytes, self._full_nbytes)
        self._outgoing = make_outgoing(
            plane, inference, Tag.STEP + group, buffer, lengths, compression
        )
        self._sending: Sender
        self._receiver = plane.receivers([Incoming(inference, Tag.REPLY + group, reply_buffer)])
        self._sequence = -1
        # Every restart of the job and of an environment is a new run of that environment.
        self._step["run_id"][:] = restart << 32
        self._waiter = link.waiter(
            lambda: (
                f"{link.label} (rank {link.rank}) waited for the actions of group {group} "
                f"from inference rank {inference}"
            )
        )

    def pack(
        self, batch: StepBatch, timers_s: Mapping[str, float], failures: Mapping[str, int]
    ) -> None:
        """Copy what the environments gave, and how often they failed so far, into the message."""
        step = self._step
        step["run_id"][:] += batch.restarted
        for name in ("valid", "reward", "terminated", "truncated", "ended"):
            step[name][:] = getattr(batch, name)
        step["episode_return"][:] = batch.episode_return
        step["episode_steps"][:] = batch.episode_steps
        step["timers_s"][:] = list(timers_s.values())
        step["failures"][:] = [failures[kind] for kind in ENV_FAILURES]
        for path in self._paths:
            step[f"obs:{path}"][:] = batch.observation[path]
        if batch.final_observation is not None:
            for path in self._paths:
                step[f"final:{path}"][:] = batch.final_observation[path]

    def send(self, batch: StepBatch) -> None:
        """Send the packed message; its final observations only if an episode was truncated."""
        self._sequence += 1
        self._step["sequence"][...] = self._sequence
        self._receiver.start(0)
        truncated = batch.truncated.any()
        self._sending = self._outgoing.ready(self._full_nbytes if truncated else self._short_nbytes)
        self._sending.start()

    def receive(self) -> npt.NDArray[np.generic] | None:
        """Wait for the actions `[E, A]`; None means STOP."""
        while not self._receiver.poll():
            self._waiter.idle()
        # The reply says that the step has arrived, so this returns at once.
        wait_until(self._sending.done, self._waiter)
        if int(self._reply["command"]) == Command.STOP:
            return None
        sequence = int(self._reply["sequence"])
        if sequence != self._sequence:
            raise RuntimeError(f"reply to step {sequence}, not {self._sequence}")
        return self._reply["action"]

    def close(self) -> None:
        """Free the receive."""
        self._receiver.cancel()


def run(job: Job, groups: Sequence[EnvBatch]) -> None:
    """Step until the inference rank says STOP."""
    inference = job.topology.inference_of[job.rank]
    channels = [
        GroupChannel(
            *(job.link, job.env, inference, g, job.rows_per_slot, job.restart),
            job.config.transport.compression,
        )
        for g in range(len(groups))
    ]
    timer = StageTimer(ACTOR_STAGES, pulse=job.link.pulse, work="step")
    for envs, channel in zip(groups, channels, strict=True):
        batch = envs.reset()
        timer.mark("step")
        channel.pack(batch, timer.seconds, envs.failures)
        channel.send(batch)
    live = list(zip(groups, channels, strict=True))
    while live:
        for envs, channel in tuple(live):
            actions = channel.receive()
            timer.mark("wait")
            if actions is None:
                live.remove((envs, channel))
                continue
            batch = envs.step(actions)
            timer.mark("step")
            channel.pack(batch, timer.seconds, envs.failures)
            timer.mark("pack")
            channel.send(batch)
            timer.mark("send")
    for envs, channel in zip(groups, channels, strict=True):
        channel.close()
        envs.close()
