"""Environments that a rank steps itself, as its own policy sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from env_wrappers import EnvBatch, StepBatch
from hpcrl.acting.pacing import PacedPolicy
from hpcrl.acting.policy import ActingPolicy
from hpcrl.comm.slots import Rows
from hpcrl.comm.stats import StatsReporter
from hpcrl.job import Job
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


class LocalGroups:
    """All groups of environments of a rank, stepped in turn, and what they count.

    Args:
      job: the job.
      groups: batches of environments.
      stats: this rank's counters.
      timer: gets the stage step, and forward where held groups go on.
      evaluation: `<bool>[N]`, environments that only measure; None: there are none.
    """

    def __init__(
        self,
        job: Job,
        groups: Sequence[EnvBatch],
        stats: StatsReporter,
        timer: StageTimer,
        evaluation: npt.NDArray[np.bool_] | None = None,
    ):
        rows = job.rows_per_slot
        self._groups = [LocalGroup(envs, g * rows, job.restart) for g, envs in enumerate(groups)]
        self._stats, self._timer = stats, timer
        num_envs = len(groups) * rows
        self._evaluation = np.zeros(num_envs, bool) if evaluation is None else evaluation
        self._turn = 0

    def next(self) -> LocalGroup:
        """Return the group whose turn it is, held or not."""
        group = self._groups[self._turn]
        self._turn = (self._turn + 1) % len(self._groups)
        return group

    @property
    def all_held(self) -> bool:
        """Whether the actions of every group are withheld."""
        return all(group.held for group in self._groups)

    def step(
        self, group: LocalGroup, ids: npt.NDArray[np.intp], actions: npt.NDArray[np.generic]
    ) -> None:
        """Step a group with the actions of its rows `ids`; note the episodes that ended."""
        given = group.step(ids, actions)
        ended = given.ended & given.valid
        self._stats.add_episodes(
            given.episode_return[ended],
            given.episode_steps[ended],
            self._evaluation[group.ids[ended]],
        )
        self._timer.mark("step")

    def resume(self, paced: PacedPolicy) -> None:
        """Give held groups their actions under the new weights, where these let them go on."""
        going = [g for g in self._groups if g.held and not paced.satisfied[g.ids].all()]
        if not going:
            return
        ids, actions = paced.resume(np.concatenate([group.ids for group in going]))
        self._timer.mark("forward")
        for group in going:
            mine = np.isin(ids, group.ids)
            self.step(group, ids[mine], actions[mine])

    def note(self, policy: ActingPolicy) -> None:
        """Bring the counters of environments and rows up to date."""
        totals = self._stats.totals
        totals["restarts"] = policy.restarts
        totals["idle_rows"] = policy.idle_rows
        failures = [sum(counts) for counts in zip(*(g.failures for g in self._groups), strict=True)]
        self._stats.set_failures(failures)
        totals["env_steps"] = totals["rows"]

    def close(self) -> None:
        """Release the environments."""
        for group in self._groups:
            group.close()
