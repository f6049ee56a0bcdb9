"""Worker: env → inference → unroll in one rank; steps its groups of environments in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from env_wrappers import EnvBatch, StepBatch
from hpcrl.acting.acting_rank import LearnerPort, make_policy
from hpcrl.acting.pacing import PacedPolicy
from hpcrl.acting.policy import ActingPolicy
from hpcrl.brain import Brain
from hpcrl.comm.slots import Rows
from hpcrl.job import INFERENCE_STAGES, Job
from hpcrl.specs import ENV_FAILURES
from hpcrl.timing import StageTimer


class LocalGroup:
    """A group of environments that this rank steps itself.

    Args:
      envs: the environments.
      first_id: row of the policy of the first of them.
      restart: of the job; every restart is a new run of each environment.

    Attributes:
      ids: `<intp>[E]`, rows of the policy.
      held: whether its actions are withheld until newer weights come.
    """

    def __init__(self, envs: EnvBatch, first_id: int, restart: int):
        self.ids = np.arange(first_id, first_id + envs.num_envs)
        self.held = False
        self._envs = envs
        self._run_id = np.full(envs.num_envs, restart << 32, np.int64)
        self._given = envs.reset()

    def rows(self) -> Rows:
        """Return the rows that wait for actions."""
        given, places = self._given, np.flatnonzero(self._given.valid)

        def chosen(
            leaves: dict[str, npt.NDArray[np.generic]],
        ) -> dict[str, npt.NDArray[np.generic]]:
            return {path: leaf[places] for path, leaf in leaves.items()}

        final = given.final_observation
        return Rows(
            ids=self.ids[places],
            run_id=self._run_id[places],
            observation=chosen(given.observation),
            reward=given.reward[places],
            terminated=given.terminated[places],
            truncated=given.truncated[places],
            final_observation=chosen(final) if final is not None else None,
        )

    def step(self, ids: npt.NDArray[np.intp], actions: npt.NDArray[np.generic]) -> StepBatch:
        """Step all environments with the actions `[n, A]` of the rows `ids`."""
        batch = np.zeros((len(self.ids), actions.shape[1]), actions.dtype)
        batch[ids - self.ids[0]] = actions
        self._given = self._envs.step(batch)
        self._run_id += self._given.restarted
        self.held = False
        return self._given

    @property
    def failures(self) -> list[int]:
        """Failures so far by kind, in the order of `ENV_FAILURES`."""
        failures = self._envs.failures
        return [failures[kind] for kind in ENV_FAILURES]

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()


def run(job: Job, brain: Brain, device: torch.device, groups: Sequence[EnvBatch]) -> None:
    """Act until the learner says STOP."""
    policy = make_policy(job, brain, device, job.env_ids(job.rank))
    paced = policy if isinstance(policy, PacedPolicy) else None
    port = LearnerPort(job, policy)
    timer = StageTimer(("step", *INFERENCE_STAGES), pulse=job.link.pulse)
    rows = job.rows_per_slot
    local = [LocalGroup(envs, g * rows, job.restart) for g, envs in enumerate(groups)]
    timer.mark("step")
    waiter = job.link.waiter(
        lambda: (
            f"{job.link.label} (rank {job.rank}) waited for {port.need()}; its learner is rank "
            f"{port.learner}"
        )
    )
    turn, at_boundary = 0, True
    while not port.stopped():
        # Weights change where unrolls end, so that few of them are acted by two versions.
        if at_boundary and port.load_newer():
            timer.mark("weights")
            if paced:
                _resume(paced, local, port, timer)
        port.outbox.pump()
        if port.stats.due:
            _report(port, policy, local, timer)
        group = local[turn]
        all_held = all(g.held for g in local)
        if port.outbox.blocked or policy.version < 0 or all_held:
            waiter.idle()
            timer.mark("blocked" if port.outbox.blocked else "held" if all_held else "wait")
            continue
        turn = (turn + 1) % len(local)
        if group.held:
            continue
        waiter.progress()
        waiting = group.rows()
        timer.mark("batch")
        actions = policy.act(waiting)
        timer.mark("forward")
        complete = policy.record()
        port.send(complete)
        at_boundary = bool(complete) or paced is not None
        port.stats.totals["batches"] += 1
        port.stats.totals["rows"] += len(waiting.ids)
        timer.mark("unroll")
        if paced and paced.satisfied[group.ids].all():
            paced.hold(group.ids)
            group.held = True
            continue
        _step(group, waiting.ids, actions, port, timer)

    port.finish(lambda: _report(port, policy, local, timer), waiter)
    for group in local:
        group.close()


def _step(
    group: LocalGroup,
    ids: npt.NDArray[np.intp],
    actions: npt.NDArray[np.generic],
    port: LearnerPort,
    timer: StageTimer,
) -> None:
    given = group.step(ids, actions)
    ended = given.ended & given.valid
    evaluation = np.zeros(int(ended.sum()), bool)
    port.stats.add_episodes(given.episode_return[ended], given.episode_steps[ended], evaluation)
    timer.mark("step")


def _resume(
    paced: PacedPolicy, local: Sequence[LocalGroup], port: LearnerPort, timer: StageTimer
) -> None:
    """Give the held groups their actions under the new weights."""
    ids, actions = paced.resume()
    timer.mark("forward")
    for group in local:
        if group.held:
            mine = np.isin(ids, group.ids)
            _step(group, ids[mine], actions[mine], port, timer)


def _report(
    port: LearnerPort, policy: ActingPolicy, local: Sequence[LocalGroup], timer: StageTimer
) -> None:
    seconds = dict(timer.seconds)
    port.stats.set_stages("actor", {"step": seconds.pop("step")})
    port.stats.set_stages("inference", seconds)
    port.stats.totals["restarts"] = policy.restarts
    port.stats.totals["idle_rows"] = policy.idle_rows
    port.stats.set_failures(
        [sum(counts) for counts in zip(*(g.failures for g in local), strict=True)]
    )
    port.stats.totals["env_steps"] = port.stats.totals["rows"]
    port.report()
