"""Inference: wire → inference → unroll; weights → inference. One policy for many actors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hpcrl.acting.acting_rank import LearnerPort, make_policy
from hpcrl.acting.pacing import PacedPolicy
from hpcrl.acting.policy import ActingPolicy
from hpcrl.brain import Brain
from hpcrl.comm.slots import StepSlots
from hpcrl.job import ACTOR_STAGES, INFERENCE_STAGES, Job, full_batch_rows
from hpcrl.timing import StageTimer


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
        job.config.transport.compression,
    )


class HeldSlots:
    """Slots whose actions are withheld until newer weights come; see `pacing`.

    An actor steps its groups in turn and can't pass over one that waits, so none of them is
    held before all of its environments are satisfied.

    Args:
      slots: the clients' slots.
      policy: whose quota says which environments wait for newer weights.
      rows_per_slot: environments of a group.
      groups: slots of each actor, side by side.
    """

    def __init__(self, slots: StepSlots, policy: PacedPolicy, rows_per_slot: int, groups: int):
        self._slots = slots
        self._policy = policy
        self._rows_per_slot = rows_per_slot
        self._groups = groups
        self._held = np.zeros(0, np.intp)

    def __bool__(self) -> bool:
        return len(self._held) > 0

    def reply(
        self,
        batch: npt.NDArray[np.intp],
        places: npt.NDArray[np.intp],
        actions: npt.NDArray[np.generic],
    ) -> None:
        """Answer the slots of actors that still owe unrolls, and hold the others."""
        rows, done = self._rows_per_slot, self._done(batch)
        self._policy.hold(self._rows_of(batch[done]))
        self._held = np.sort(np.concatenate([self._held, batch[done]]))
        keep = ~done[places // rows]
        position = np.cumsum(~done) - 1
        going = position[places[keep] // rows] * rows + places[keep] % rows
        self._answer(batch[~done], going, actions[keep])

    def resume(self) -> None:
        """Answer held slots with actions of the current weights, where these let them go on."""
        done = self._done(self._held)
        going, self._held = self._held[~done], self._held[done]
        ids, actions = self._policy.resume(self._rows_of(going))
        rows = self._rows_per_slot
        places = np.searchsorted(going, ids // rows) * rows + ids % rows
        self._answer(going, places, actions)

    def give_up(self) -> None:
        """Let the held slots wait for their actions like any other."""
        self._slots.put_back(self._held)
        self._held = self._held[:0]

    def _done(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of `slots` are of actors whose environments all wait for newer weights."""
        by_actor = self._policy.satisfied.reshape(-1, self._groups * self._rows_per_slot)
        done: npt.NDArray[np.bool_] = np.all(by_actor[slots // self._groups], axis=1)
        return done

    def _rows_of(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Rows of the policy of all environments of `slots`."""
        rows = self._rows_per_slot
        return (slots[:, None] * rows + np.arange(rows)).ravel()

    def _answer(
        self,
        slots: npt.NDArray[np.intp],
        places: npt.NDArray[np.intp],
        actions: npt.NDArray[np.generic],
    ) -> None:
        if len(slots):
            self._slots.reply(slots, places, actions)


def run(job: Job, brain: Brain, device: torch.device, given_slots: StepSlots | None = None) -> None:
    """Serve actions until the learner says STOP.

    Args:
      job: this rank's job.
      brain: network and acting rule.
      device: where the network lives.
      given_slots: the clients' slots, if not those of `make_slots`.
    """
    link = job.link
    env_ids = np.concatenate([job.env_ids(a) for a in job.topology.actors_of[job.rank]])
    policy = make_policy(job, brain, device, env_ids)
    slots, clients = given_slots or make_slots(job), job.clients(job.rank)
    port = LearnerPort(job, policy)
    held = None
    if isinstance(policy, PacedPolicy):
        held = HeldSlots(slots, policy, job.rows_per_slot, job.config.env.groups)
    stats = port.stats
    timer = StageTimer(INFERENCE_STAGES, pulse=link.pulse, work="forward")
    waiter = link.waiter(
        lambda: (
            f"{link.label} (rank {link.rank}) waited for {port.need()}; {slots.num_waiting} of "
            f"{len(clients)} slots wait, learner is rank {port.learner}"
        )
    )

    while not port.stopped():
        if port.load_newer():
            timer.mark("weights")
            if held is not None:
                held.resume()
                timer.mark("forward")
        port.outbox.pump()
        if stats.due:
            _report(port, timer, slots, policy)
        slots.poll()
        if slots.num_lost == len(clients):
            raise RuntimeError(f"all actors of {link.label} have died: it has no environments")
        if port.outbox.blocked or policy.version < 0 or not slots.due():
            waiter.idle(job.config.inference.max_wait_s if slots.num_waiting else 1.0)
            timer.mark("blocked" if port.outbox.blocked else "held" if held else "wait")
            continue
        waiter.progress()
        stats.totals["row_wait_s"] += slots.first_wait_s()
        batch = slots.take()
        rows, places = slots.rows(batch)
        episodes = slots.episodes(batch)
        timer.mark("batch")
        actions = policy.act(rows)
        timer.mark("forward")
        if held is not None:
            # What a row completes decides whether its action goes out.
            port.send(policy.record())
            held.reply(batch, places, actions)
            timer.mark("scatter")
        else:
            slots.reply(batch, places, actions)
            timer.mark("scatter")
            port.send(policy.record())
        stats.add_episodes(episodes.returns, episodes.steps, policy.evaluation[episodes.ids])
        stats.totals["batches"] += 1
        stats.totals["rows"] += len(places)
        timer.mark("unroll")

    if held is not None:
        held.give_up()
    slots.stop(link)
    port.finish(lambda: _report(port, timer, slots, policy), waiter)
    slots.close()


def _report(port: LearnerPort, timer: StageTimer, slots: StepSlots, policy: ActingPolicy) -> None:
    stats = port.stats
    stats.set_stages("inference", timer.seconds)
    stats.set_stages("actor", dict(zip(ACTOR_STAGES, slots.timers_s().tolist(), strict=True)))
    stats.totals["restarts"] = policy.restarts
    stats.totals["lost_actors"] = len(port.lost_ranks)
    stats.totals["idle_rows"] = policy.idle_rows
    stats.set_failures(slots.failures().tolist())
    stats.totals["env_steps"] = stats.totals["rows"]
    port.report()
