"""A learner's share of the replay: received unrolls go in, agreed batches come out.

The learners' shards act as one prioritized buffer. Every learner draws its share of the batch
from its own shard before it votes; the vote brings the total mass and size and the largest
weight of the global batch, from which the importance weights follow. The ratio of items
trained on to items stored is held by a credit: storing earns it, training spends it. A learner
without credit waits for unrolls, and unrolls wait (in the end: the environments) while a
learner has credit for two batches, so one side always can go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcrl.agents import ReplayWindow
from hpcrl.agreement import Rule
from hpcrl.batches import assemble_sample
from hpcrl.host_memory import available_bytes
from hpcrl.job import Job
from hpcrl.replay.importance import GlobalReplayStats, one_buffer_weights
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.memory import check_capacity, check_memory, sample_bytes
from hpcrl.replay.records import ReplaySample, ReplayUnroll
from hpcrl.replay.storage import ReplayShard
from hpcrl.replay_checkpoint import ReplayCheckpoint
from hpcrl.sources import Taken
from hpcrl.specs import ArraySpec
from hpcrl.trainer import StepResult
from hpcrl.unroll_flow import UnrollInbox
from hpcrl.wire import row_fields

_SCAN_EVERY_DRAWS = 100
"""Mean and largest priority need a scan over all items; this often."""


def replay_layout(job: Job, window: ReplayWindow) -> ReplayLayout:
    """Return what a shard stores: the rows of the unroll message, and states by item."""
    size = job.core_size
    return ReplayLayout(
        rows=row_fields(job.env, {}),
        items={"core_state": ArraySpec((size,), "float32")} if size else {},
        unroll_length=job.config.learner.unroll_steps,
        burn_in=window.burn_in_steps,
        sequence_length=window.loss_steps,
        items_per_unroll=window.items_per_unroll,
        stacks={
            f"obs:{p}": leaf.stack for p, leaf in job.env.observation.items() if leaf.stack > 1
        },
    )


class ReplayBuffer:
    """A rank-local shard behind the interface of `sources.Source`."""

    def __init__(self, job: Job, window: ReplayWindow):
        """Check capacity and memory, allocate the shard and post the receives.

        Raises:
          ValueError: the shard can't hold what it must.
          MemoryError: the shard doesn't fit into memory.
        """
        self.rules: Mapping[str, Rule] = {
            "mass": "sum",
            "size": "sum",
            "largest_weight": "max",
            "stored_steps": "sum",
            "sampled": "sum",
            "least_sampled": "min",
            "most_sampled": "max",
            "priority_sum": "sum",
            "largest_priority": "max",
        }
        self._job = job
        self._config = job.config.replay
        self._batch = job.local_batch_unrolls
        self._clients = job.topology.clients_of[job.rank]
        self._num_shards = len(job.topology.learner_ranks)
        layout = replay_layout(job, window)
        min_unrolls = -(-self._config.min_size_unrolls // self._num_shards)
        self._min_items = max(min_unrolls * layout.items_per_unroll, 1)
        self.shard = self._make_shard(layout)
        self._buffers = self.shard.make_buffers(self._batch)
        slots = job.queue_slots_per_source(len(self._clients))
        self.version = 0
        self._inbox = UnrollInbox(job.link, self._clients, job.unroll, slots)
        self._files = ReplayCheckpoint(job)
        self._rng = np.random.default_rng(job.seed("replay", job.role_index))
        self._drawn: ReplaySample | None = None
        self._drawn_mass = 0.0
        self._credit = 0.0
        self._filled = False
        self._told_quarters = 0
        self._earning_unrolls = 0
        self._stored_steps = 0
        self._priorities = (0.0, 0.0)

    def _make_shard(self, layout: ReplayLayout) -> ReplayShard:
        job, config = self._job, self._config
        capacity = config.capacity_unrolls // self._num_shards
        actors = sum(len(job.topology.actors_of[rank]) for rank in self._clients)
        streams = actors * job.config.env.envs_per_actor
        check_capacity(layout, capacity, streams, self._min_items, self._batch)
        node = job.topology.node_of[job.rank]
        sharing = sum(job.topology.node_of[rank] == node for rank in job.topology.learner_ranks)
        memory = config.memory_bytes or available_bytes() // sharing
        check_memory(layout, capacity, streams, memory, sample_bytes(layout, self._batch))
        return ReplayShard(
            layout,
            capacity,
            streams,
            config.priority_exponent,
            config.min_priority,
            config.compression,
        )

    def serve(self) -> bool:
        """Store arrived unrolls while there is no credit for two batches."""
        arrived = self._inbox.poll()
        while len(self._inbox) and (not self._filled or self._credit < 2 * self._batch):
            slot = self._inbox.take(1)
            views = {name: view[slot[0]] for name, view in self._inbox.views.items()}
            self._store(views)
            self._inbox.release(slot)
        return arrived

    def _store(self, views: Mapping[str, npt.NDArray[Any]]) -> None:
        layout = self.shard.layout
        priorities = views["priority"]
        self.shard.add(
            ReplayUnroll(
                stream_id=int(views["env_id"]),
                run_id=int(views["run_id"]),
                unroll_index=int(views["unroll_index"]),
                rows={name: views[name] for name in layout.rows},
                items={name: views[name][None] for name in layout.items},
                priorities=np.maximum(priorities, 0.0),
                eligible=priorities >= 0.0,
            )
        )
        self._stored_steps += int(np.count_nonzero(~views["final"][:-1]))
        if self._filled:
            self._earning_unrolls += 1
            self._credit += self._config.ratio * layout.items_per_unroll
        if not self._filled:
            self._fill()

    def _fill(self) -> None:
        """Learning begins when the shard is full enough; say how far it is."""
        size = self.shard.size
        self._filled = size >= self._min_items
        quarters = 4 * size // self._min_items
        if quarters > self._told_quarters and self._job.rank == self._job.root:
            self._told_quarters = quarters
            label, needed = self._job.link.label, self._min_items
            print(f"{label}: replay holds {size:,} of {needed:,} items to begin", flush=True)

    def ready(self) -> bool:
        """Whether there are enough items and credit for a batch."""
        return self._filled and self._credit >= self._batch

    def vote(self) -> dict[str, float]:
        """Draw a batch, if there is one; return what its weights and the metrics need."""
        sampler = self.shard.sampler
        largest_weight = 0.0
        if self.ready():
            self._drawn = self.shard.sample(self._batch, self._rng, self._buffers)
            self._drawn_mass = sampler.mass
            largest_weight = self._largest_relative_weight(self._drawn.probability)
            if (sampler.num_draws - 1) % _SCAN_EVERY_DRAWS == 0:
                self._priorities = sampler.priority_sum, sampler.max_priority
        sampled = float(self.shard.counters.sampled_items)
        stored_steps, self._stored_steps = self._stored_steps, 0
        return {
            "mass": sampler.mass,
            "size": sampler.size,
            "largest_weight": largest_weight,
            "stored_steps": stored_steps,
            "sampled": sampled,
            "least_sampled": sampled,
            "most_sampled": sampled,
            "priority_sum": self._priorities[0],
            "largest_priority": self._priorities[1],
        }

    def _largest_relative_weight(self, probability: npt.NDArray[np.float64]) -> float:
        """The part of `one_buffer_weights` that differs between learners, of the largest."""
        exponent = self._config.importance_exponent
        own = self._drawn_mass ** (1 - exponent) * self._num_shards
        return float(own * probability.min() ** -exponent)

    def take(self, agreed: Mapping[str, float]) -> Taken:
        """Return the drawn items with weights relative to the largest of the global batch."""
        drawn = self._drawn
        if drawn is None:
            raise RuntimeError("the learners agreed on a step without a batch on this one")
        exponent = self._config.importance_exponent
        stats = GlobalReplayStats(
            num_shards=self._num_shards,
            mass=agreed["mass"],
            size=int(agreed["size"]),
            mean_priority=agreed["priority_sum"] / agreed["size"],
            max_priority=agreed["largest_priority"],
            max_inverse_probability=0.0,
        )
        largest = agreed["largest_weight"] * stats.mass ** (exponent - 1) * stats.size**-exponent
        weights = one_buffer_weights(
            drawn.probability, self._drawn_mass, 1 / self._num_shards, stats, exponent, largest
        )
        batch = assemble_sample(drawn, weights, self._job.env, self._job.core_size)
        self._credit -= self._batch
        return Taken(batch, int(agreed["stored_steps"]), self._values(drawn, agreed, stats))

    def _values(
        self, drawn: ReplaySample, agreed: Mapping[str, float], stats: GlobalReplayStats
    ) -> dict[str, float]:
        counters = self.shard.counters
        sampled = max(agreed["sampled"], 1.0)
        stored = self._earning_unrolls * self.shard.layout.items_per_unroll
        return {
            "queue_fill": self._inbox.fill,
            "replay_items": stats.size,
            "replay_age_unrolls": float(drawn.age_unrolls.mean()),
            "replay_ratio": counters.sampled_items / max(stored, 1),
            "replay_least_shard_share": agreed["least_sampled"] / sampled,
            "replay_most_shard_share": agreed["most_sampled"] / sampled,
            "priority_mean": stats.mean_priority,
            "priority_max": stats.max_priority,
            "priority_age_draws": float(drawn.priority_age_draws.mean()),
            "priority_stale_share": counters.stale_updates / max(counters.sampled_items, 1),
        }

    def feedback(self, result: StepResult) -> None:
        """Write the items' new priorities; those of evicted items are ignored and counted."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None and result.priorities is not None and not result.skipped:
            self.shard.update_priorities(drawn.slots, drawn.generations, result.priorities)

    def status(self) -> str:
        """Say what the replay holds and which side waits."""
        waiting = "for the other learners" if self.ready() else "for unrolls"
        return (
            f"holds {self.shard.size} items (at least {self._min_items} to begin), has credit for "
            f"{self._credit:.0f} of {self._batch} items and waits {waiting}"
        )

    def discard(self) -> None:
        """Throw away what has arrived."""
        self._inbox.discard()

    def restore(self, learner_steps: int) -> None:
        """Fill the shard with what was saved; it earns credit from the next unroll on."""
        self._files.restore(self.shard, learner_steps)
        self._filled = self.shard.size >= self._min_items

    def save(self, learner_steps: int) -> None:
        """Write the shard, if the configuration says so."""
        self._files.save(self.shard, learner_steps)

    def close(self, learner_steps: int) -> None:
        """Withdraw the posted receives; all shards are written, so older ones can go."""
        self._inbox.close()
        self._files.prune(learner_steps)
