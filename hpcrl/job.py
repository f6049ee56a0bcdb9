"""What every rank of a job knows, and the messages and numbers that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpcrl.agents.a3c.config import A3CConfig
from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.agents.vtrace.config import VTraceConfig
from hpcrl.comm.link import Group, Link
from hpcrl.comm.slots import Client
from hpcrl.comm.team import Team
from hpcrl.comm.wire import Layout, gradient_layout, parameters_layout, unroll_layout
from hpcrl.config.root import Config
from hpcrl.specs import ArraySpec, EnvSpec
from hpcrl.topology import Topology
from hpcrl.topology.shards import Bounds, shard_bounds

ACTOR_STAGES = ("step", "pack", "send", "wait")
INFERENCE_STAGES = ("wait", "held", "blocked", "batch", "forward", "scatter", "unroll", "weights")
LEARNER_STAGES = ("wait", "batch", "copy", "forward_backward", "all_reduce", "optimizer", "publish")
GRADIENT_STAGES = ("copy", "forward_backward", "exchange")
SERVER_STAGES = ("wait", "optimizer", "publish")

_MIN_REPLAY_SLOTS = 4


def local_batch_unrolls(config: Config, topology: Topology) -> int:
    """Return how many unrolls each learner takes per step."""
    return config.learner.batch_unrolls // len(topology.learner_ranks)


def unrolls_per_learner_step(config: Config) -> float:
    """Return how many unrolls all learners together receive for each step, on average."""
    if isinstance(config.agent, VTraceConfig | PPOConfig | A3CConfig):
        return config.learner.batch_unrolls
    items = config.agent.items_per_unroll(config.learner.unroll_steps)
    return config.learner.batch_unrolls / (config.replay.ratio * items)


def _replay_slots(config: Config, topology: Topology, sources: int) -> int:
    """Room for what comes from each source during one learner step: acting goes on meanwhile."""
    unrolls = unrolls_per_learner_step(config) / len(topology.learner_ranks)
    return max(_MIN_REPLAY_SLOTS, math.ceil(unrolls / sources))


def queue_slots_per_source(config: Config, topology: Topology, sources: int) -> int:
    """Return how many receive slots a learner posts for each of its `sources`."""
    if config.layout == "replay" and not config.learner.queue_unrolls:
        return _replay_slots(config, topology, sources)
    queue = config.learner.queue_unrolls or _queue_unrolls(config, topology, sources)
    return max(1, -(-queue // sources))


def _queue_unrolls(config: Config, topology: Topology, sources: int) -> int:
    """Two or three batches.

    Environments that started together complete unrolls together. Two batches and those in flight
    may not hold one of each, and then acting stands still although the learner waits soon after.
    """
    acting = len(topology.ranks_of("actor")) + len(topology.ranks_of("worker"))
    environments = acting * config.env.envs_per_actor // len(topology.learner_ranks)
    batch = local_batch_unrolls(config, topology)
    in_flight = sources * credit_unrolls(config, topology, sources)
    return min(max(environments - in_flight, 2 * batch), 3 * batch)


def credit_unrolls(config: Config, topology: Topology, sources: int) -> int:
    """Return how many unrolls each of a learner's `sources` may have in flight."""
    if config.layout == "replay" and not config.inference.credits_unrolls:
        return _replay_slots(config, topology, sources)
    share = -(-local_batch_unrolls(config, topology) // sources)
    return config.inference.credits_unrolls or max(1, share)


def unroll_shares(config: Config, topology: Topology, learner: int) -> dict[int, int]:
    """Return the unrolls of each source in a batch of a learner whose acting waits for weights.

    They are in proportion to the sources' environments, up to rounding, and sum to its share of
    the global batch.
    """
    sources = topology.clients_of[learner]
    actors = [len(topology.actors_of.get(rank, (rank,))) for rank in sources]
    batch, total = local_batch_unrolls(config, topology), sum(actors)
    edges = [batch * sum(actors[:i]) // total for i in range(len(actors) + 1)]
    return {rank: edges[i + 1] - edges[i] for i, rank in enumerate(sources)}


def max_gradient_lag(config: Config, topology: Topology) -> int:
    """Return how many versions a gradient may be behind the shard that it is applied to."""
    bound = config.learner.max_gradient_lag
    return 4 * len(topology.ranks_of("worker")) if bound == "auto" else bound


def full_batch_rows(config: Config, rows: int) -> int:
    """Return the rows that make a full batch on an inference rank that serves `rows`."""
    return config.inference.max_batch_rows or max(1, rows // 2)


@dataclass(frozen=True)
class Seat:
    """One rank's place in the job, known before any environment is built.

    Attributes:
      config: the resolved configuration.
      topology: who does what.
      link: this rank's connection.
      world: the group of all ranks.
      run_dir: the run directory; only the root learner writes there, but for logs.
      restart: 0 on the first start, then one more on every resume.
      team: the ranks that step environments with this one; None where each steps its own.
      code_version: which code the job runs.
      recorded_bytes: what the trajectories of earlier starts take on disk; 0 where nothing is
        recorded.
    """

    config: Config
    topology: Topology
    link: Link
    world: Group
    run_dir: Path
    restart: int
    team: Team | None = field(default=None, kw_only=True)
    code_version: str = field(default="", kw_only=True)
    recorded_bytes: int = field(default=0, kw_only=True)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.link.rank

    @property
    def root(self) -> int:
        """Rank of learner 0, which writes the run directory."""
        return self.topology.root_learner

    @property
    def role_index(self) -> int:
        """Index of this rank within its role."""
        return self.topology.index_of_role[self.rank]

    @property
    def rows_per_slot(self) -> int:
        """Environments of one group."""
        return self.config.env.envs_per_actor // self.config.env.groups

    @property
    def num_envs(self) -> int:
        """Environments of the whole job."""
        topology = self.topology
        acting = len(topology.ranks_of("actor")) + len(topology.ranks_of("worker"))
        return acting * self.config.env.envs_per_actor

    @property
    def local_batch_unrolls(self) -> int:
        """Unrolls that each learner takes per step."""
        return local_batch_unrolls(self.config, self.topology)

    def env_ids(self, actor_rank: int) -> npt.NDArray[np.int64]:
        """Global ids of an actor's environments, from its role index."""
        count = self.config.env.envs_per_actor
        first = self.topology.index_of_role[actor_rank] * count
        return np.arange(first, first + count, dtype=np.int64)

    def seed(self, role: str, index: int) -> int:
        """A 63-bit seed from the run's seed, the restart, role and index; never a rank.

        The restart is part of it, so that a resumed run doesn't play its old episodes again.
        """
        words = [self.config.run.seed, self.restart, *role.encode(), index]
        state = np.random.SeedSequence(words).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))


@dataclass(frozen=True)
class Job(Seat):
    """The job once the environment's spaces are known: its messages and queues follow.

    Attributes:
      env: the environment's spec.
      behaviour: what acting records per step; empty on ranks that see no unrolls.
      core_size: S, length of the recurrent state.
      replay_items: replay items of each unroll, 0 without a replay.
      num_parameters: P, of the flat buffer; 0 on ranks without a network.
      metrics: names of what the loss measures, where workers compute gradients.
    """

    env: EnvSpec
    behaviour: Mapping[str, ArraySpec]
    core_size: int
    replay_items: int = 0
    num_parameters: int = 0
    metrics: tuple[str, ...] = ()

    @cached_property
    def unroll(self) -> Layout:
        """The unroll message."""
        steps = self.config.learner.unroll_steps
        return unroll_layout(self.env, self.behaviour, steps, self.core_size, self.replay_items)

    @cached_property
    def shards(self) -> list[Bounds]:
        """Each learner's stretch of the flat parameters, where they share them."""
        return shard_bounds(self.num_parameters, len(self.topology.learner_ranks))

    @cached_property
    def gradients(self) -> list[Layout]:
        """The gradient message of each shard."""
        return [gradient_layout(last - first, self.metrics) for first, last in self.shards]

    @cached_property
    def parameters(self) -> list[Layout]:
        """The answer for each shard."""
        return [parameters_layout(last - first) for first, last in self.shards]

    def clients(self, inference_rank: int) -> list[Client]:
        """Slots of an inference rank: every group of every one of its actors."""
        actors = self.topology.actors_of[inference_rank]
        return [Client(a, g) for a in actors for g in range(self.config.env.groups)]

    def queue_slots_per_source(self, sources: int) -> int:
        """Receive slots that a learner posts for each of its sources."""
        return queue_slots_per_source(self.config, self.topology, sources)

    def unroll_shares(self, learner: int) -> dict[int, int]:
        """Unrolls of each source in a batch of `learner`; see the function of this name."""
        return unroll_shares(self.config, self.topology, learner)

    def credits(self, sources: int) -> int:
        """Synchronous sends that each of a learner's sources may have in flight."""
        return credit_unrolls(self.config, self.topology, sources)
