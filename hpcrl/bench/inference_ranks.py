"""Ranks of `hpcrl bench inference`: one inference rank, actors that never step, a sink.

The inference rank runs the role's own loop. The actors answer each action at once with the same
observations. The sink is the learner of the cell: it throws unrolls away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from env_wrappers.batch import StepBatch
from hpcrl.bench.costs import noise
from hpcrl.bench.ranks import read_arguments, write_result
from hpcrl.bench.seat import stop_clients, take_seat
from hpcrl.brain import Brain, autocast
from hpcrl.comm.commands import CommandSender
from hpcrl.comm.link import wait_until
from hpcrl.comm.slots import StepSlots
from hpcrl.comm.startup import gather_json
from hpcrl.comm.stats import StatsCollector
from hpcrl.comm.weights import WeightsPublisher
from hpcrl.job import ACTOR_STAGES, INFERENCE_STAGES, Job
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.sources import OnPolicyQueue
from hpcrl.roles import inference
from hpcrl.roles.actor import GroupChannel
from hpcrl.specs import ENV_FAILURES
from hpcrl.types import NetInputs

_KEEP = 100_000
_WARM_UP = 0.2
"""Share of the samples, from the start, that are left out."""


class ObservedSlots(StepSlots):
    """Slots that note the rows and the wait of every batch."""

    rows_per_slot = 1

    def observe(self, rows_per_slot: int) -> ObservedSlots:
        """Start with no notes."""
        self.rows_per_slot = rows_per_slot
        self.batches: list[tuple[float, int, float]] = []
        return self

    def take(self) -> npt.NDArray[np.intp]:
        """Return all waiting slots."""
        waited_s = self.first_wait_s()
        slots = super().take()
        if len(self.batches) < _KEEP:
            note = (time.perf_counter(), len(slots) * self.rows_per_slot, waited_s)
            self.batches.append(note)
        return slots


def bare_network(job: Job, brain: Brain, rows: int, seconds: float) -> float:
    """Rows per second of the forward pass and the choice of actions, and nothing else."""
    network = brain.make_network(0).eval()
    observation = {}
    for path, leaf in job.env.observation.items():
        stack = (leaf.stack,) if leaf.stack > 1 else ()
        shape = (1, rows, *stack, *leaf.array.shape)
        observation[path] = torch.from_numpy(noise(shape, leaf.array.dtype))
    action = torch.zeros(1, rows, job.env.action.size)
    if job.env.action.dtype == "int32":
        action = action.int()
    inputs = NetInputs(observation, torch.zeros(1, rows), action, torch.zeros(1, rows).bool())
    state, generator = network.initial_state(rows), torch.Generator().manual_seed(0)
    precision = job.config.inference.precision

    @torch.no_grad()
    def once() -> None:
        with autocast(precision, torch.device("cpu")):
            brain.act(network, inputs, state, generator)

    return rows / _median_s(once, seconds)


def _median_s(call: Callable[[], None], seconds: float) -> float:
    call()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return float(np.median(times))


def serve(job: Job, brain: Brain, seconds: float) -> dict[str, Any]:
    """Run the inference role; return its batches and the bare network's rate."""
    clients = job.clients(job.rank)
    limits = job.config.inference
    rows = len(clients) * job.rows_per_slot
    full = limits.max_batch_rows or max(1, rows // 2)
    before = bare_network(job, brain, min(full, rows), seconds)
    slots = ObservedSlots(
        *(job.link, job.env, clients, job.rows_per_slot, len(ACTOR_STAGES), full),
        *(limits.max_wait_s, job.config.transport.compression),
    ).observe(job.rows_per_slot)
    inference.run(job, brain, torch.device("cpu"), slots)
    notes = slots.batches[int(_WARM_UP * len(slots.batches)) :]
    times, sizes, waits = (np.array(column) for column in zip(*notes, strict=True))
    rate = float(sizes[1:].sum() / (times[-1] - times[0]))
    typical = round(float(sizes.mean()))
    after = bare_network(job, brain, typical, seconds)
    return {
        "rows_per_s": rate,
        "batches_per_s": float((len(times) - 1) / (times[-1] - times[0])),
        "batch_rows": _spread(sizes),
        "batch_rows_histogram": _histogram(sizes),
        "first_row_wait_ms": _spread(1e3 * waits),
        "bare_rows": typical,
        "bare_rows_per_s": after,
        "bare_rows_per_s_before": before,
        "ratio": rate / after,
    }


def _histogram(sizes: npt.NDArray[Any]) -> dict[str, int]:
    values, counts = np.unique(sizes, return_counts=True)
    return {str(int(v)): int(c) for v, c in zip(values, counts, strict=True)}


def _spread(values: npt.NDArray[Any]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}


def load(job: Job) -> npt.NDArray[np.float64]:
    """Send steps as fast as actions come; return the seconds from each step to its actions."""
    rows, num_groups = job.rows_per_slot, job.config.env.groups
    server = job.topology.inference_of[job.rank]
    batch = constant_batch(job, rows)
    compression = job.config.transport.compression
    channels = [
        GroupChannel(job.link, job.env, server, g, rows, 0, compression) for g in range(num_groups)
    ]
    sent_s = [0.0] * num_groups
    for group, channel in enumerate(channels):
        channel.pack(batch, dict.fromkeys(ACTOR_STAGES, 0.0), dict.fromkeys(ENV_FAILURES, 0))
        sent_s[group] = time.perf_counter()
        channel.send(batch)
    latencies: list[float] = []
    live = list(range(num_groups))
    while live:
        for group in tuple(live):
            if channels[group].receive() is None:
                live.remove(group)
                continue
            now_s = time.perf_counter()
            latencies.append(now_s - sent_s[group])
            sent_s[group] = now_s
            channels[group].send(batch)
    for channel in channels:
        channel.close()
    return np.array(latencies[int(_WARM_UP * len(latencies)) :][:_KEEP])


def constant_batch(job: Job, rows: int) -> StepBatch:
    """What environments would give that never end an episode."""
    no = np.zeros(rows, bool)
    return StepBatch(
        observation={
            path: noise((rows, *leaf.array.shape), leaf.array.dtype)
            for path, leaf in job.env.observation.items()
        },
        reward=np.zeros(rows, np.float32),
        terminated=no,
        truncated=no,
        valid=~no,
        restarted=no,
        final_observation=None,
        ended=no,
        episode_return=np.zeros(rows, np.float32),
        episode_steps=np.zeros(rows, np.int32),
    )


def sink(job: Job, brain: Brain, seconds: float) -> dict[str, float]:
    """Hand out one version of the weights, drop unrolls, stop the others after `seconds`.

    Returns:
      Share of the inference rank's time by stage.
    """
    link, clients = job.link, job.topology.clients_of[job.rank]
    queue = OnPolicyQueue(job)
    parameters = FlatParameters(brain.make_network(0)).value.numpy()
    publisher = WeightsPublisher(link, clients, len(parameters))
    commands = CommandSender(link, clients)
    collector = StatsCollector(link, clients)
    waiter = link.waiter(lambda: "the sink waited for its time to end")
    first_s = None

    def drain() -> None:
        queue.discard()
        publisher.serve(lambda: parameters, 0)
        collector.poll()

    while first_s is None or time.monotonic() < first_s + seconds:
        drain()
        if first_s is None and collector.totals["batches"] > 0:
            first_s = time.monotonic()
        waiter.idle()
    stop_clients(commands, publisher, job, drain)
    collector.poll()
    totals = {s: collector.totals[f"inference_{s}_s"] for s in INFERENCE_STAGES}
    whole = sum(totals.values())
    return {stage: total / whole for stage, total in totals.items()}


def main() -> None:
    """Play this rank's part."""
    arguments = read_arguments()
    job, brain = take_seat(arguments["config"], arguments["run_dir"])
    role = job.topology.role_of[job.rank]
    found: dict[str, Any] = {}
    latencies = np.zeros(0)
    if role == "learner":
        found = {"stages": sink(job, brain, arguments["seconds"])}
    elif role == "inference":
        found = serve(job, brain, arguments["bare_seconds"])
    else:
        latencies = load(job)
    every = _gather(job, found, latencies)
    if job.rank == 0:
        write_result(arguments, every)


def _gather(job: Job, found: dict[str, Any], latencies: npt.NDArray[Any]) -> dict[str, Any]:
    done = job.world.start_allgather(np.zeros(1))
    # The others may still be measuring the bare network.
    wait_until(done.done, job.link.waiter(lambda: "a rank waited for the others' results"))
    if len(latencies):
        found = {"latency_ms": _spread(1e3 * latencies)}
    parts = gather_json(job.world, found)
    spreads = [part["latency_ms"] for part in parts if "latency_ms" in part]
    merged = {name: float(np.mean([s[name] for s in spreads])) for name in spreads[0]}
    return {**{k: v for part in parts for k, v in part.items()}, "latency_ms": merged}


if __name__ == "__main__":
    main()
