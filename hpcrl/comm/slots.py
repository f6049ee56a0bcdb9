"""An inference rank's clients: pre-posted receives straight into batch slots, and replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpcrl.comm.link import Incoming, Link, wait_until
from hpcrl.comm.packing import PackedSlots, check_length
from hpcrl.comm.wire import Command, Tag, reply_layout, step_layout
from hpcrl.compression import make_codec
from hpcrl.specs import EnvSpec


class Client(NamedTuple):
    """One group of an actor's environments: one slot."""

    rank: int
    group: int


class Rows(NamedTuple):
    """Environment rows that wait for actions; N of them, each its own environment.

    Attributes:
      ids: `<intp>[N]` row of this inference rank, constant per environment.
      run_id: `<int64>[N]`, changes when the environment was restarted.
      observation: leaves by path, `[N, ...]`, single frames.
      reward: `<float32>[N]`, of the previous action.
      terminated, truncated: `<bool>[N]`, of the previous action; `observation` is then the
        next episode's first.
      final_observation: leaves by path, `[N, ...]`, meaningful where `truncated`; None when
        no row is truncated.
    """

    ids: npt.NDArray[np.intp]
    run_id: npt.NDArray[np.int64]
    observation: dict[str, npt.NDArray[np.generic]]
    reward: npt.NDArray[np.float32]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    final_observation: dict[str, npt.NDArray[np.generic]] | None


class Episodes(NamedTuple):
    """Episodes that ended.

    Attributes:
      ids: `<intp>[n]` row of this inference rank.
      returns: `<float32>[n]`, unclipped.
      steps: `<int32>[n]`, agent steps.
    """

    ids: npt.NDArray[np.intp]
    returns: npt.NDArray[np.float32]
    steps: npt.NDArray[np.int32]


class StepSlots:
    """All clients' slots and the rule that says when a batch is due.

    A batch is due when it is full, OR its first row has waited `max_wait_s`, OR every
    client waits, so that nothing more can arrive.

    Args:
      link: this rank's link.
      env: the environment's spec.
      clients: one per slot.
      rows_per_slot: environments of a group.
      num_timers: actor stage timers in each message.
      max_batch_rows: rows that make a batch full.
      max_wait_s: longest wait of the first row.
      compression: of the clients' messages.
    """

    def __init__(
        self,
        link: Link,
        env: EnvSpec,
        clients: Sequence[Client],
        rows_per_slot: int,
        num_timers: int,
        max_batch_rows: int,
        max_wait_s: float,
        compression: str = "none",
    ):
        self._rows_per_slot = rows_per_slot
        self._max_batch_rows = max_batch_rows
        self._lost_ranks = link.lost_ranks
        self._lost: set[int] = set()
        self._max_wait_s = max_wait_s
        self._clients = clients
        step, reply = step_layout(env, rows_per_slot, num_timers), reply_layout(env, rows_per_slot)
        plane = link.plane("steps")
        self._step_buffer = step.buffer(len(clients))
        self._step = step.views(self._step_buffer)
        self._obs = {p: self._step[f"obs:{p}"] for p in env.observation}
        self._final = {p: self._step[f"final:{p}"] for p in env.observation}
        check_length(step.nbytes, link.max_message_bytes, compression)
        codec = make_codec(compression)
        self._packed = PackedSlots(len(clients), step.nbytes, codec) if codec else None
        arrivals = self._packed.buffer if self._packed else self._step_buffer
        self._receivers = plane.receivers(
            [
                Incoming(client.rank, Tag.STEP + client.group, arrivals[slot])
                for slot, client in enumerate(clients)
            ]
        )
        self._reply_buffer = reply.buffer(len(clients))
        self._reply = reply.views(self._reply_buffer)
        self._senders = [
            plane.sender(client.rank, Tag.REPLY + client.group, self._reply_buffer[slot])
            for slot, client in enumerate(clients)
        ]
        self._waiter = link.waiter(lambda: f"{link.label} waited for a reply to leave")
        self._waiting: list[int] = []
        self._first_arrival_s = 0.0
        self._sequence = np.zeros(len(clients), np.int64)
        for slot in range(len(clients)):
            self._receivers.start(slot)

    def poll(self) -> bool:
        """Take note of arrived messages and of dead clients; return whether there were any."""
        arrived = self._receivers.poll()
        if self._lost_ranks:
            self._drop_lost()
            arrived = [slot for slot in arrived if slot not in self._lost]
        if not arrived:
            return False
        if not self._waiting:
            self._first_arrival_s = time.perf_counter()
        self._waiting += arrived
        if self._packed:
            for slot in arrived:
                self._packed.unpack(slot, self._step_buffer[slot])
        self._check_sequence(arrived)
        return True

    def _check_sequence(self, arrived: Sequence[int]) -> None:
        for slot in arrived:
            expected, got = self._sequence[slot], self._step["sequence"][slot]
            if got != expected:
                raise RuntimeError(
                    f"step message {got} of rank {self._clients[slot].rank} group "
                    f"{self._clients[slot].group}: expected number {expected}; its slot was "
                    "overwritten or a message was lost"
                )

    def _drop_lost(self) -> None:
        """Forget the slots of dead clients: their unrolls under construction never end."""
        self._lost = {s for s, c in enumerate(self._clients) if c.rank in self._lost_ranks}
        self._waiting = [slot for slot in self._waiting if slot not in self._lost]

    @property
    def num_lost(self) -> int:
        """Slots whose client has died."""
        return len(self._lost)

    @property
    def num_waiting(self) -> int:
        """Slots whose environments wait for actions."""
        return len(self._waiting)

    def due(self) -> bool:
        """Whether a batch should be dispatched now."""
        waiting = len(self._waiting)
        if waiting == 0:
            return False
        alive = len(self._clients) - len(self._lost)
        return (
            # With fewer clients, the same share of them makes a full batch.
            waiting * self._rows_per_slot * len(self._clients) >= self._max_batch_rows * alive
            or waiting == alive
            or time.perf_counter() - self._first_arrival_s >= self._max_wait_s
        )

    def first_wait_s(self) -> float:
        """Seconds that the batch's first row has waited."""
        return time.perf_counter() - self._first_arrival_s

    def take(self) -> npt.NDArray[np.intp]:
        """Return all waiting slots `<intp>[n]`; they no longer wait."""
        slots = np.array(sorted(self._waiting), np.intp)
        self._waiting.clear()
        return slots

    def put_back(self, slots: npt.NDArray[np.intp]) -> None:
        """Let taken slots that were not answered wait again."""
        self._waiting += slots.tolist()

    def rows(self, slots: npt.NDArray[np.intp]) -> tuple[Rows, npt.NDArray[np.intp]]:
        """Copy the valid rows of `slots` out; return them and their places in the batch."""
        step = {name: self._step[name][slots] for name in ("valid", "run_id", "reward")}
        places = np.flatnonzero(step["valid"])
        ids = (slots[:, None] * self._rows_per_slot + np.arange(self._rows_per_slot)).ravel()
        truncated = self._column("truncated", slots, places)
        final = None
        if truncated.any():
            final = {p: _pick(view, slots, places) for p, view in self._final.items()}
        rows = Rows(
            ids=ids[places],
            run_id=step["run_id"].reshape(-1)[places],
            observation={p: _pick(view, slots, places) for p, view in self._obs.items()},
            reward=step["reward"].reshape(-1)[places],
            terminated=self._column("terminated", slots, places),
            truncated=truncated,
            final_observation=final,
        )
        return rows, places

    def _column(
        self, name: str, slots: npt.NDArray[np.intp], places: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.bool_]:
        column: npt.NDArray[np.bool_] = self._step[name][slots].reshape(-1)[places]
        return column

    def episodes(self, slots: npt.NDArray[np.intp]) -> Episodes:
        """Return the episodes that ended in `slots`."""
        ended = self._step["ended"][slots] & self._step["valid"][slots]
        ids = slots[:, None] * self._rows_per_slot + np.arange(self._rows_per_slot)
        return Episodes(
            ids[ended],
            self._step["episode_return"][slots][ended],
            self._step["episode_steps"][slots][ended],
        )

    def timers_s(self) -> npt.NDArray[np.float64]:
        """Stage seconds of all clients' actors, `[num_timers]`, each actor counted once."""
        first = [slot for slot, client in enumerate(self._clients) if client.group == 0]
        total: npt.NDArray[np.float64] = self._step["timers_s"][first].sum(0)
        return total

    def failures(self) -> npt.NDArray[np.int64]:
        """Failures of all clients' environments so far, by kind, `[len(ENV_FAILURES)]`."""
        total: npt.NDArray[np.int64] = self._step["failures"].sum(0)
        return total

    def reply(
        self,
        slots: npt.NDArray[np.intp],
        places: npt.NDArray[np.intp],
        actions: npt.NDArray[np.generic],
    ) -> None:
        """Answer `slots` with the actions `[N, A]` of the rows at `places`; post the next step.

        `places` may come in any order, and rows that aren't valid are not among them. The rows
        must have been copied out: the next message lands in the same bytes.
        """
        batch = np.zeros((len(slots) * self._rows_per_slot, actions.shape[1]), actions.dtype)
        batch[places] = actions
        self._reply["action"][slots] = batch.reshape(len(slots), self._rows_per_slot, -1)
        for slot in slots.tolist():
            if slot in self._lost:
                continue
            self._receivers.start(slot)
            self._send(slot, Command.ACT)
            self._sequence[slot] += 1

    def _send(self, slot: int, command: Command) -> None:
        # The client has sent its next step, so it has received the previous reply.
        wait_until(self._senders[slot].done, self._waiter)
        self._reply["command"][slot] = command
        self._reply["sequence"][slot] = self._sequence[slot]
        self._senders[slot].start()

    def stop(self, link: Link) -> None:
        """Answer every client's outstanding or next step with STOP, and wait for all of them."""
        stopped: set[int] = set()

        def missing() -> str:
            absent = [c.rank for s, c in enumerate(self._clients) if s not in answered()]
            return f"{link.label} waited at shut-down for a step of actor ranks {absent}"

        def answered() -> set[int]:
            return stopped | self._lost

        waiter = link.waiter(missing)
        while len(answered()) < len(self._clients):
            self.poll()
            if not self._waiting:
                waiter.idle()
                continue
            for slot in self.take():
                self._send(int(slot), Command.STOP)
                stopped.add(int(slot))
            waiter.progress()
        while not all(
            slot in self._lost or sender.done() for slot, sender in enumerate(self._senders)
        ):
            self.poll()
            waiter.idle()

    def close(self) -> None:
        """Free the receives."""
        self._receivers.cancel()


def _pick(
    view: npt.NDArray[np.generic], slots: npt.NDArray[np.intp], places: npt.NDArray[np.intp]
) -> npt.NDArray[np.generic]:
    """Copy `[S, E, ...]` rows of `slots` at `places` of the flattened batch, `[N, ...]`."""
    batch = view[slots]
    rows = batch.reshape(-1, *batch.shape[2:])
    return rows if len(places) == len(rows) else rows[places]
