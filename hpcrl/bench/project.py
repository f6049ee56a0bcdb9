"""`hpcrl bench project`: how fast a job of many nodes would be, from the costs of its stages."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcrl.bench.ranks import BenchError
from hpcrl.bench.result import Chart, Result, Sheet
from hpcrl.bench.simulator import Network, SimulatedJob
from hpcrl.bench.stage_costs import StageCosts, measure_stages
from hpcrl.bench.system import mean, train
from hpcrl.config.load import load_config
from hpcrl.config.root import Config
from hpcrl.job import full_batch_rows
from hpcrl.run.metrics import read_metrics
from hpcrl.start.demand import check_shares, demand_of
from hpcrl.start.training import check_together
from hpcrl.topology import Topology, local_world_size, plan_topology, uniform_node_map

TOLERANCE = 0.15
"""Largest difference of a prediction from a real run."""
_COST_S = 2.0
_GPU_COSTS = ("act_batch_s", "act_row_s", "train_s", "weights_s")


@dataclass(frozen=True)
class Machine:
    """Equal nodes.

    Attributes:
      ranks_per_node: of the job.
      cores_per_node: that a node has.
      gpus_per_node: that a node has.
      network: between them.
      gpu_costs: seconds on a GPU that replace those on a core, by name of `_GPU_COSTS`.
    """

    ranks_per_node: int
    cores_per_node: int
    gpus_per_node: int
    network: Network
    gpu_costs: Mapping[str, float]


def read_gpu_costs(path: str | None) -> dict[str, float]:
    """Read the key `stage_costs` of what benchmarks/gpu_check.py wrote.

    Raises:
      BenchError: it can't be read or has no such costs.
    """
    if path is None:
        return {}
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))["stage_costs"]
        return {name: float(data[name]) for name in _GPU_COSTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{path} holds no stage costs as benchmarks/gpu_check.py writes them: {error!r}"
        ) from None


def topology_of(config: Config, nodes: int, machine: Machine) -> Topology:
    """Plan the job on `nodes` equal nodes.

    Raises:
      TopologyError, ConfigError: it can't be laid out.
      BenchError: there is no model of its layout.
    """
    if config.layout == "async_gradient":
        raise BenchError("layout async_gradient, whose workers send gradients, has no model")
    demand = demand_of(config)
    ranks = machine.ranks_per_node or local_world_size(
        config.topology, demand, machine.cores_per_node
    )
    node_map = uniform_node_map(nodes, ranks, machine.gpus_per_node, machine.cores_per_node)
    topology = plan_topology(config.topology, node_map, demand)
    check_together(config)
    check_shares(config, topology)
    return topology


def serving_rows(config: Config, topology: Topology) -> int:
    """Return the rows of a full batch of the first rank that chooses actions."""
    inference = topology.ranks_of("inference")
    if not inference:
        return config.env.envs_per_actor // config.env.groups
    clients = len(topology.actors_of[inference[0]])
    return full_batch_rows(config, clients * config.env.envs_per_actor)


def scaled(costs: StageCosts, config: Config, learners: int, machine: Machine) -> StageCosts:
    """Return costs measured at one learner's whole batch for a share of it, or for GPUs."""
    shared = replace(costs, assemble_s=costs.assemble_s / learners)
    if machine.gpu_costs:
        shared = replace(shared, **machine.gpu_costs)
    # The optimizer's part doesn't shrink with the batch; it is small beside it.
    return replace(shared, train_s=shared.train_s / learners)


def predict(
    config: Config, nodes: int, machine: Machine, costs: StageCosts, learner_steps: int = 40
) -> dict[str, Any]:
    """Simulate the job on `nodes` nodes; return its figures and what limits it."""
    topology = topology_of(config, nodes, machine)
    learners = len(topology.learner_ranks)
    costs = scaled(costs, config, learners, machine)
    job = SimulatedJob(config, topology, costs, machine.network)
    figures = job.run(learner_steps)
    acting = len(topology.ranks_of("actor")) + len(topology.ranks_of("worker"))
    return {
        "nodes": nodes,
        "ranks": topology.world_size,
        "learners": learners,
        "environments": acting * config.env.envs_per_actor,
        **figures,
        "limit": limit_of(figures["busy"]),
        "simulated_part": 1 / job.share.scale,
    }


def limit_of(busy: Mapping[str, float]) -> str:
    """Return which resource saturates first: the busiest, the node's cores if all want them."""
    if busy["cores of a node"] > 0.95:
        return "cores of a node"
    ranks = {name: share for name, share in busy.items() if name != "cores of a node"}
    return max(ranks, key=lambda name: ranks[name])


def bench_project(
    path: str,
    overrides: Sequence[str],
    nodes: Sequence[int],
    machine: Machine,
    costs_path: str | None,
    cost_s: float = _COST_S,
) -> Result:
    """Predict the job on every number of nodes.

    Args:
      path: the configuration.
      overrides: of its keys.
      nodes: numbers of nodes.
      machine: the nodes.
      costs_path: a result file whose `stage_costs` to use; measured here if None.
      cost_s: of each measurement of a stage.

    Raises:
      ConfigError: the configuration can't be used.
      BenchError: costs can't be had.
    """
    config = load_config(path, overrides)
    if machine.gpus_per_node and not machine.gpu_costs:
        raise BenchError(
            f"nodes with {machine.gpus_per_node} GPUs need --gpu-costs: what "
            "benchmarks/gpu_check.py has measured on one of them"
        )
    rows = serving_rows(config, topology_of(config, min(nodes), machine))
    if costs_path is None:
        costs = measure_stages(config, rows, 1, cost_s)
    else:
        costs = _read_costs(costs_path)
    cases = [predict(config, count, machine, costs) for count in sorted(set(nodes))]
    first, last = cases[0], cases[-1]
    linear = first["agent_steps_per_s"] / first["nodes"] * last["nodes"]
    return Result(
        "project",
        last["agent_steps_per_s"] / linear,
        f"predicted rate on {last['nodes']} nodes of linear from {first['nodes']}; "
        f"{last['limit']} saturate first",
        {"stage_costs": asdict(costs), "cases": cases},
        [_costs_sheet(costs), _cases_sheet(cases)],
        [_rate_chart(cases), _busy_chart(cases)],
    )


def _read_costs(path: str) -> StageCosts:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))["stage_costs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} holds no stage costs: {error!r}") from None
    return StageCosts.from_json(data)


def _costs_sheet(costs: StageCosts) -> Sheet:
    rows = [
        (name.removesuffix("_s").replace("_", " "), 1e3 * value, "ms")
        if name.endswith("_s")
        else (name.removesuffix("_bytes").replace("_", " "), value, "bytes")
        for name, value in asdict(costs).items()
        if name != "env_spread"
    ]
    return Sheet("stages: seconds of one core", ("stage", "cost", "unit"), rows)


def _cases_sheet(cases: Sequence[dict[str, Any]]) -> Sheet:
    columns = ("nodes", "ranks", "environments", "steps/s", "batch rows", "lag", "limit")
    names = ("ranks", "environments", "agent_steps_per_s", "batch_rows", "policy_lag", "limit")
    return Sheet(
        "predicted", columns, [(str(c["nodes"]), *(c[name] for name in names)) for c in cases]
    )


def _rate_chart(cases: Sequence[dict[str, Any]]) -> Chart:
    points = [(c["nodes"], c["agent_steps_per_s"]) for c in cases]
    first = points[0][1] / points[0][0]
    linear = [(count, first * count) for count, _ in points]
    series = {"predicted": points, "linear": linear}
    return Chart("agent steps per second", "nodes", "steps/s", series, log_x=True)


def _busy_chart(cases: Sequence[dict[str, Any]]) -> Chart:
    busy = {
        name: [(c["nodes"], c["busy"][name]) for c in cases if name in c["busy"]]
        for name in cases[0]["busy"]
    }
    return Chart("what is busy", "nodes", "share of its time", busy, log_x=True, goal=1.0)


def bench_check(
    path: str,
    overrides: Sequence[str],
    actors: Sequence[int],
    seconds: float,
    warm_up_s: float,
    cost_s: float = _COST_S,
) -> Result:
    """Train with every number of acting ranks here, and predict the same.

    Costs are measured before each run and after the last, as the machine's speed may drift; a
    prediction uses those around its run.

    Args:
      path: the configuration.
      overrides: of its keys.
      actors: numbers of acting ranks.
      seconds: of steady training.
      warm_up_s: of training before that.
      cost_s: of each measurement of a stage.

    Raises:
      ConfigError: the configuration can't be used.
      BenchError: training failed, or too little of it was seen.
    """
    sizes = sorted(set(actors))
    options = {n: [*overrides, "--topology.actors", str(n)] for n in sizes}
    configs = {n: load_config(path, options[n]) for n in sizes}
    cores = len(os.sched_getaffinity(0))
    machine = Machine(0, cores, 0, Network(), {})
    places = {n: topology_of(configs[n], 1, machine) for n in sizes}

    def costs_of(n: int) -> StageCosts:
        learners = len(places[n].learner_ranks)
        return measure_stages(configs[n], serving_rows(configs[n], places[n]), learners, cost_s)

    cases, before = [], costs_of(sizes[0])
    for index, n in enumerate(sizes):
        real = _real(path, options[n], seconds, warm_up_s)
        after = costs_of(sizes[min(index + 1, len(sizes) - 1)])
        costs = StageCosts.mean([before, after])
        before = after
        job = SimulatedJob(configs[n], places[n], costs, machine.network, 10**6)
        figures = job.run(60)
        names = ("agent_steps_per_s", "batch_rows", "policy_lag")
        cases.append(
            {
                "actors": n,
                "ratio": figures["agent_steps_per_s"] / real["agent_steps_per_s"],
                "real": {name: real[name] for name in names},
                "predicted": {name: figures[name] for name in names},
                "busy": figures["busy"],
                "stage_costs": asdict(costs),
            }
        )
    return check_result(cases)


def _real(path: str, overrides: Sequence[str], seconds: float, warm_up_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        run = Path(folder) / "run"
        train(path, overrides, run, seconds, warm_up_s)
        steady = [r for r in read_metrics(run) if r["wall_time_s"] >= warm_up_s]
    if len(steady) < 2:
        raise BenchError(f"{seconds:g} s hold no two records of metrics: give --seconds more")
    first, last = steady[0], steady[-1]
    elapsed_s = last["wall_time_s"] - first["wall_time_s"]
    return {
        "agent_steps_per_s": (last["agent_steps"] - first["agent_steps"]) / elapsed_s,
        "batch_rows": mean(steady, "batch_rows"),
        "policy_lag": mean(steady, "policy_lag"),
    }


def check_result(cases: Sequence[dict[str, Any]]) -> Result:
    """Return the result; its headline is the prediction that is farthest off."""
    worst = max(cases, key=lambda case: abs(case["ratio"] - 1))
    columns = ("acting ranks", "real steps/s", "predicted", "ratio", "real batch", "predicted")
    rows = [
        (
            str(c["actors"]),
            c["real"]["agent_steps_per_s"],
            c["predicted"]["agent_steps_per_s"],
            c["ratio"],
            c["real"]["batch_rows"],
            c["predicted"]["batch_rows"],
            c["real"]["policy_lag"],
            c["predicted"]["policy_lag"],
        )
        for c in cases
    ]
    series = {
        kind: [(c["actors"], c[kind]["agent_steps_per_s"]) for c in cases]
        for kind in ("real", "predicted")
    }
    return Result(
        "project-check",
        worst["ratio"],
        f"predicted over real rate where it is farthest off, at {worst['actors']} acting ranks "
        f"(goal {1 - TOLERANCE:g} to {1 + TOLERANCE:g})",
        {"within": abs(worst["ratio"] - 1) <= TOLERANCE, "cases": list(cases)},
        [Sheet("predictions against real runs", (*columns, "real lag", "predicted"), rows)],
        [Chart("agent steps per second", "acting ranks", "steps/s", series, log_x=True)],
    )
