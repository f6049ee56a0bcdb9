"""A discrete-event model of a job: cells of actors, inference ranks or workers, and learners.

Every rank follows its role's loop in `hpcrl/roles/`; what a stage costs is given, and the ranks of
a node share its cores. Of a large job some cells are simulated, and of each some of the sources of
its learner: the others are like them. A learner's batch, queue and traffic are then divided by
the same factor.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcrl.bench.events import Clock, Cores, Interface
from hpcrl.bench.simulated_acting import Inference, Worker
from hpcrl.bench.simulated_ranks import Learner, Rank
from hpcrl.bench.stage_costs import StageCosts
from hpcrl.config.root import Config
from hpcrl.job import (
    credit_unrolls,
    local_batch_unrolls,
    queue_slots_per_source,
    unrolls_per_learner_step,
)
from hpcrl.layouts import rules_of
from hpcrl.node.node_facts import threads_beside
from hpcrl.timing import choose_wait_policy
from hpcrl.topology import Topology

POLL_SHARE = 0.02
"""Of a core that a rank uses which waits by backoff (benchmarks/waiting.py)."""
_SLICE_S = 0.01


@dataclass(frozen=True)
class Network:
    """Between nodes; within a node messages cost what `StageCosts.message_s` says."""

    latency_s: float = 2e-6
    bytes_per_s: float = 12e9


class Share(NamedTuple):
    """What of a job is simulated.

    Attributes:
      sources: inference ranks or workers, by their learner.
      thinning: of each learner's sources over those that are simulated.
      scale: of the whole job's sources over those that are simulated.
    """

    sources: dict[int, tuple[int, ...]]
    thinning: float
    scale: float


def choose_share(topology: Topology, groups: int, most_groups: int) -> Share:
    """Return as many whole cells as step about `most_groups` groups, or a part of the first."""
    chosen: dict[int, tuple[int, ...]] = {}
    taken = 0
    for learner in topology.learner_ranks:
        kept: list[int] = []
        for source in topology.clients_of[learner]:
            if kept and not chosen and taken >= most_groups:
                break
            kept.append(source)
            taken += groups * max(1, len(topology.actors_of.get(source, ())))
        chosen[learner] = tuple(kept)
        if taken >= most_groups:
            break
    simulated = sum(len(kept) for kept in chosen.values())
    thinning = sum(len(topology.clients_of[learner]) for learner in chosen) / simulated
    sources = sum(len(clients) for clients in topology.clients_of.values())
    return Share(chosen, thinning, sources / simulated)


class Tally:
    """What a simulation counts once it is steady."""

    def __init__(self) -> None:
        self.trained_steps = 0.0
        self.rows = self.batches = 0
        self.lag_sum = self.lag_count = 0.0
        self.learner_steps = 0


class SimulatedJob:
    """One simulation.

    Args:
      config: the configuration.
      topology: who is where.
      costs: of each stage.
      network: between nodes.
      most_groups: of environments that are simulated, about.
      seed: of the environments' spread.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        costs: StageCosts,
        network: Network,
        most_groups: int = 1000,
        seed: int = 0,
    ):
        self.config, self.topology, self.costs = config, topology, costs
        self.clock, self.random, self.tally = Clock(), random.Random(seed), Tally()
        self.steady_s = math.inf
        self.groups = config.env.groups
        self.rows = config.env.envs_per_actor // config.env.groups
        self.unroll_steps = config.learner.unroll_steps
        self.share = choose_share(topology, self.groups, most_groups)
        self._plan(config, topology)
        self._build_nodes(network)
        self.learners = [Learner(self, rank) for rank in self.share.sources]
        self.sources = [
            (Inference if topology.placement == "central" else Worker)(self, rank, learner)
            for learner in self.learners
            for rank in self.share.sources[learner.rank]
        ]
        self._votes: list[Learner] = []
        self._reduced: list[Learner] = []

    def _plan(self, config: Config, topology: Topology) -> None:
        """Numbers that follow from the configuration."""
        sources = len(topology.clients_of[topology.learner_ranks[0]])
        self.credits = credit_unrolls(config, topology, sources)
        self.slots = queue_slots_per_source(config, topology, sources)
        self.batch = local_batch_unrolls(config, topology) / self.share.thinning
        self.ratio_items = 0.0
        if config.layout == "replay":
            self.ratio_items = config.learner.batch_unrolls / unrolls_per_learner_step(config)
        acting = len(topology.ranks_of("actor")) + len(topology.ranks_of("worker"))
        self.quota = 0
        if rules_of(config).synchronous:
            self.quota = config.learner.batch_unrolls // (acting * config.env.envs_per_actor)

    def _build_nodes(self, network: Network) -> None:
        topology, share = self.topology, self.share
        ranks = [*share.sources]
        for sources in share.sources.values():
            ranks += [r for s in sources for r in (s, *topology.actors_of.get(s, ()))]
        here = Counter(topology.node_of[rank] for rank in ranks)
        self.cores_of: dict[int, Cores] = {}
        self.crowded: dict[int, bool] = {}
        self.sleeps: dict[int, bool] = {}
        self._interfaces: dict[int, Interface] = {}
        self._gpus: dict[tuple[int, int], Cores] = {}
        for node, count in here.items():
            facts = topology.nodes[node]
            cores, total = facts.num_cores or len(facts.ranks), len(facts.ranks)
            threads = threads_beside(self.config, topology, facts.ranks[0])
            self.crowded[node] = threads > cores
            wait = choose_wait_policy(self.config.transport.wait, threads, cores)
            self.sleeps[node] = wait == "backoff"
            poll = POLL_SHARE if self.sleeps[node] else 0.0
            # Ranks that are not simulated use their part of the node.
            self.cores_of[node] = Cores(self.clock, cores * count / total, poll)
            self._interfaces[node] = Interface(
                self.clock, network.latency_s, network.bytes_per_s * count / total
            )
        learners = len(topology.learner_ranks)
        nbytes = self.costs.weights_bytes
        self._sum_s = 0.0
        if learners > 1:
            self._sum_s = 2 * nbytes * (learners - 1) / learners / network.bytes_per_s
            self._sum_s += 2 * math.ceil(math.log2(learners)) * network.latency_s

    def gpu(self, node: int, device: int) -> Cores:
        """Return a GPU, which computes for one rank at full speed or for several in turn."""
        return self._gpus.setdefault((node, device), Cores(self.clock, 1))

    def jitter(self) -> float:
        """Return the factor of one step of a group of environments."""
        return max(0.1, self.random.gauss(1.0, min(self.costs.env_spread, 0.5)))

    def send(
        self,
        sender: Rank,
        receiver: Rank,
        nbytes: float,
        act: Callable[..., None],
        *arguments: object,
    ) -> None:
        """Call `act` once a message has come in."""
        if sender.node == receiver.node:
            self.clock.after(0.0, act, *arguments)
        else:
            self._interfaces[receiver.node].receive(nbytes, act, *arguments)

    def vote(self, learner: Learner) -> None:
        """A learner has a batch; when all have, they step."""
        self._votes.append(learner)
        if len(self._votes) == len(self.learners):
            voters, self._votes = self._votes, []
            for voter in voters:
                voter.step()

    def reduce(self, learner: Learner) -> None:
        """A learner has its gradient; when all have, they sum them."""
        self._reduced.append(learner)
        if len(self._reduced) == len(self.learners):
            summed, self._reduced = self._reduced, []
            self.tally.learner_steps += 1
            for one in summed:
                self.clock.after(self._sum_s, one.reduced)

    def count_batch(self, rows: int) -> None:
        """Count a batch of actions."""
        self.tally.batches += 1
        self.tally.rows += rows

    def count_trained(self, unrolls: float) -> None:
        """Count unrolls that were trained on, or stored."""
        self.tally.trained_steps += unrolls * self.unroll_steps

    def count_lag(self, lag: float) -> None:
        """Count an unroll's lag."""
        self.tally.lag_sum += lag
        self.tally.lag_count += 1

    def run(self, learner_steps: int = 40, most_events: int = 600_000) -> dict[str, Any]:
        """Simulate until learners have stepped so often; a third as much before that is left out.

        Both last at least until every environment has given two unrolls.

        Returns:
          Figures by name; see `_figures`.

        Raises:
          RuntimeError: nobody can go on: the model, or a batch that never fills.
        """
        for source in self.sources:
            source.begin()
            source.learner.ask(source)
        for learner in self.learners:
            learner.loop()
        self._run_to(learner_steps // 3, most_events // 3)
        self.tally = Tally()
        self.steady_s = self.clock.now
        for rank in self._ranks():
            rank.worked_s = 0.0
        for cores in [*self.cores_of.values(), *self._gpus.values()]:
            cores.busy_s = 0.0
        for interface in self._interfaces.values():
            interface.busy_s = 0.0
        self._run_to(learner_steps, most_events)
        return self._figures(self.clock.now - self.steady_s)

    def _run_to(self, learner_steps: int, most_events: int) -> None:
        acting = [rank for source in self.sources for rank in source.acting]
        agent_steps = 2 * len(acting) * self.groups * self.rows * self.unroll_steps
        while self.clock.events < most_events and (
            self.tally.learner_steps < learner_steps or self.tally.trained_steps < agent_steps
        ):
            if self.clock.still:
                raise RuntimeError(f"no event after {self.clock.now:.3f} s: nobody can go on")
            self.clock.run(self.clock.now + _SLICE_S, most_events)

    def _ranks(self) -> list[Rank]:
        acting = [rank for source in self.sources for rank in source.acting]
        return [*self.learners, *self.sources, *acting]

    def _figures(self, elapsed_s: float) -> dict[str, Any]:
        tally = self.tally

        def share(ranks: list[Rank]) -> float:
            return sum(r.worked_s for r in ranks) / len(ranks) / elapsed_s

        actors: list[Rank] = [a for s in self.sources if isinstance(s, Inference) for a in s.actors]
        acting = {"workers": share([*self.sources])}
        if actors:
            acting = {"actors": share(actors), "inference ranks": share([*self.sources])}
        cores = {n: c.busy_s / c.count / elapsed_s for n, c in self.cores_of.items()}
        network = max(i.busy_s for i in self._interfaces.values()) / elapsed_s
        # Unrolls of environments that began together come together; rows come evenly.
        steps = tally.trained_steps if self.quota else tally.rows
        return {
            "agent_steps_per_s": steps * self.share.scale / elapsed_s,
            "batch_rows": tally.rows / max(tally.batches, 1),
            "policy_lag": tally.lag_sum / max(tally.lag_count, 1.0),
            "learner_steps_per_s": tally.learner_steps / elapsed_s,
            "simulated_s": elapsed_s,
            "busy": {
                **acting,
                "learners": share([*self.learners]),
                "cores of a node": max(cores.values()),
                "network": network,
            },
            "events": self.clock.events,
        }
