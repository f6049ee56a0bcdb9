"""A learner's share of the replay: received unrolls go in, agreed batches come out.

The learners' shards act as one prioritized buffer. Every learner draws its share of the batch
from its own shard before it votes; the vote brings the total mass and size and the largest
weight of the global batch, from which the importance weights follow. The ratio of items
trained on to items stored is held by a credit: storing earns it, training spends it. A learner
without credit waits for unrolls, and unrolls wait (in the end: the environments) while a
learner has credit for two batches, so one side always can go on.

Until every shard is full enough the learners vote without a batch: one that is still filling
does so now and then, so that those that wait for it know that it lives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcrl.agents import ReplayWindow
from hpcrl.comm.agreement import Rule
from hpcrl.comm.link import Group
from hpcrl.comm.unroll_flow import UnrollInbox
from hpcrl.comm.wire import row_fields
from hpcrl.job import Job
from hpcrl.learning.batches import assemble_sample
from hpcrl.learning.sources import Taken
from hpcrl.learning.trainer import StepResult
from hpcrl.node.host_memory import available_bytes
from hpcrl.replay.background_write import background_bytes
from hpcrl.replay.importance import GlobalReplayStats, one_buffer_weights
from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.memory import check_capacity, check_memory, sample_bytes
from hpcrl.replay.records import ReplaySample, ReplayUnroll
from hpcrl.replay.storage import ReplayShard
from hpcrl.run.replay_checkpoint import RULES, ReplayCheckpoint, ShardSet
from hpcrl.specs import ArraySpec

_SIGN_S = 10.0
"""Longest time between votes of a learner that is still filling its shard."""
_TELL_AFTER_VOTES = 200

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
            "filled": "min",
            "largest_weight": "max",
            "smallest_weight": "min",
            "stored_steps": "sum",
            "earned": "sum",
            "sampled": "each",
            "age": "each",
            "priority_age": "sum",
            "stale": "sum",
            "held": "sum",
            "priority_sum": "sum",
            "largest_priority": "max",
            **RULES,
        }
        self._job = job
        self._config = job.config.replay
        self._batch = job.local_batch_unrolls
        self._clients = job.topology.clients_of[job.rank]
        self._num_shards = len(job.topology.learner_ranks)
        self._files = ReplayCheckpoint(job)
        layout = replay_layout(job, window)
        min_unrolls = -(-self._config.min_size_unrolls // self._num_shards)
        self._min_items = max(min_unrolls * layout.items_per_unroll, 1)
        self.shard = self._make_shard(layout)
        self._buffers = self.shard.make_buffers(self._batch)
        slots = job.queue_slots_per_source(len(self._clients))
        self.version = 0
        self._inbox = UnrollInbox(job.link, self._clients, job.unroll, slots)
        self._rng = np.random.default_rng(job.seed("replay", job.role_index))
        self._drawn: ReplaySample | None = None
        self._drawn_mass = 0.0
        self._credit = 0.0
        self._filled = self._all_filled = False
        self._sign_every_s = min(_SIGN_S, job.config.transport.deadline_s / 4)
        self._next_sign_s = 0.0
        self._told_quarters = 0
        self._held_votes = self._votes = 0
        self._earning_unrolls = 0
        self._stored_steps = 0
        self._priorities = (0.0, 0.0)

    def _make_shard(self, layout: ReplayLayout) -> ReplayShard:
        job, config = self._job, self._config
        capacity = config.capacity_unrolls // self._num_shards
        actors_of = job.topology.actors_of  # a worker is its own
        actors = sum(len(actors_of.get(rank, (rank,))) for rank in self._clients)
        streams = actors * job.config.env.envs_per_actor
        check_capacity(layout, capacity, streams, self._min_items, self._batch)
        node = job.topology.node_of[job.rank]
        sharing = sum(job.topology.node_of[rank] == node for rank in job.topology.learner_ranks)
        memory = config.memory_bytes or available_bytes() // sharing
        buffers = sample_bytes(layout, self._batch)
        if job.config.checkpoint.replay != "none":
            buffers += background_bytes(layout)
        check_memory(layout, capacity, streams, memory, buffers)
        self._files.check_space(layout, capacity, config.compression)
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
        self._files.serve()
        arrived = self._inbox.poll()
        while len(self._inbox) and not self._holds_back:
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
        """Whether to vote: with a batch or, until all shards are full enough, without."""
        if self._all_filled:
            return self._has_batch
        return self._filled or time.monotonic() >= self._next_sign_s

    @property
    def _has_batch(self) -> bool:
        return self._filled and self._credit >= self._batch

    @property
    def _holds_back(self) -> bool:
        """Whether unrolls wait for training."""
        return self._filled and self._credit >= 2 * self._batch

    def vote(self) -> dict[str, float]:
        """Draw a batch, if there is one; return what its weights and the metrics need."""
        self._next_sign_s = time.monotonic() + self._sign_every_s
        sampler, counters = self.shard.sampler, self.shard.counters
        largest_weight = smallest_weight = age = priority_age = 0.0
        if self._all_filled and self._has_batch:
            drawn = self._drawn = self.shard.sample(self._batch, self._rng, self._buffers)
            self._drawn_mass = sampler.mass
            largest_weight = self._relative_weight(drawn.probability.min())
            smallest_weight = self._relative_weight(drawn.probability.max())
            age, priority_age = drawn.age_unrolls.mean(), drawn.priority_age_draws.mean()
            if (sampler.num_draws - 1) % _SCAN_EVERY_DRAWS == 0:
                self._priorities = sampler.priority_sum, sampler.max_priority
        stored_steps, self._stored_steps = self._stored_steps, 0
        return {
            "mass": sampler.mass,
            "size": sampler.size,
            "filled": self._filled,
            "largest_weight": largest_weight,
            "smallest_weight": smallest_weight,
            "stored_steps": stored_steps,
            "earned": self._earning_unrolls * self.shard.layout.items_per_unroll,
            "sampled": self.shard.counters.sampled_items,
            "age": age,
            "priority_age": priority_age,
            "stale": counters.stale_updates,
            "held": self._holds_back and len(self._inbox) > 0,
            "priority_sum": self._priorities[0],
            "largest_priority": self._priorities[1],
            **self._files.vote(),
        }

    def _relative_weight(self, probability: float) -> float:
        """The part of `one_buffer_weights` that differs between learners and items."""
        exponent = self._config.importance_exponent
        return float(self._drawn_mass ** (1 - exponent) * self._num_shards * probability**-exponent)

    def agree(self, agreed: Mapping[str, float], checkpoint_durable: bool) -> bool:
        """Note what became of the files; there is a step when all voted with a batch."""
        self._files.agree(agreed, checkpoint_durable)
        go, self._all_filled = self._all_filled, bool(agreed["filled"])
        return go

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
        self._tell_who_waits(agreed["held"])
        batch = assemble_sample(drawn, weights, self._job.env, self._job.core_size)
        self._credit -= self._batch
        return Taken(batch, int(agreed["stored_steps"]), self._values(agreed, stats))

    def _values(self, agreed: Mapping[str, float], stats: GlobalReplayStats) -> dict[str, float]:
        shards = range(self._num_shards)
        sampled = [agreed[f"sampled_{i}"] for i in shards]
        ages = [agreed[f"age_{i}"] for i in shards]
        total = max(sum(sampled), 1.0)
        values = {
            "queue_fill": self._inbox.fill,
            "replay_items": stats.size,
            "replay_age_unrolls": sum(ages) / len(ages),
            "replay_ratio": total / max(agreed["earned"], 1.0),
            "replay_acting_held": agreed["held"] / self._num_shards,
            "replay_least_shard_share": min(sampled) / total,
            "replay_most_shard_share": max(sampled) / total,
            "weight_smallest": agreed["smallest_weight"] / agreed["largest_weight"],
            "replay_write_s": self._files.write_s,
            "priority_mean": stats.mean_priority,
            "priority_max": stats.max_priority,
            "priority_age_draws": agreed["priority_age"] / self._num_shards,
            "priority_stale_share": agreed["stale"] / total,
        }
        if self._num_shards > 1:
            for i in shards:
                values[f"replay_shard_{i}_share"] = sampled[i] / total
                values[f"replay_shard_{i}_age_unrolls"] = ages[i]
        return values

    def _tell_who_waits(self, held: float) -> None:
        """Say once, from the first votes, which side the ratio holds back."""
        self._votes += 1
        self._held_votes += held > 0
        if self._votes == _TELL_AFTER_VOTES and self._job.rank == self._job.root:
            acting = 2 * self._held_votes > self._votes
            waits, other = ("acting", "learning") if acting else ("learning", "acting")
            print(
                f"{self._job.link.label}: replay.ratio {self._config.ratio:g} is held: {waits} "
                f"waits for {other} (replay_acting_held and learner_wait_share show how much)",
                flush=True,
            )

    def feedback(self, result: StepResult) -> None:
        """Write the items' new priorities; those of evicted items are ignored and counted."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None and result.priorities is not None and not result.skipped:
            self.shard.update_priorities(drawn.slots, drawn.generations, result.priorities)

    def status(self) -> str:
        """Say what the replay holds and which side waits."""
        enough = self._has_batch if self._all_filled else self._filled
        waiting = "for the other learners" if enough else "for unrolls"
        return (
            f"holds {self.shard.size} items (at least {self._min_items} to begin), has credit for "
            f"{self._credit:.0f} of {self._batch} items and waits {waiting}"
        )

    def discard(self) -> None:
        """Throw away what has arrived."""
        self._inbox.discard()

    def saved(self, learner_steps: int) -> dict[str, Any] | None:
        """Return the set of shards to go on with."""
        shard_set = self._files.find(learner_steps)
        return None if shard_set is None else asdict(shard_set)

    def restore(self, saved: dict[str, Any]) -> None:
        """Fill the shard with what was saved; it earns credit from the next unroll on."""
        self._files.restore(self.shard, ShardSet(**saved))
        self._filled = self.shard.size >= self._min_items

    def begin_save(self, learner_steps: int) -> None:
        """Begin to write the shard, if the configuration says so."""
        self._files.begin(self.shard, learner_steps)

    def save(self, learner_steps: int, group: Group) -> None:
        """Write the shard, if the configuration says so."""
        self._files.save(self.shard, learner_steps, group)

    def close(self) -> None:
        """Withdraw the posted receives."""
        self._inbox.close()
