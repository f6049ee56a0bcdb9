"""The commands of `hpcrl bench`; each imports what it needs, when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from hpcrl import exit_codes

if TYPE_CHECKING:
    from hpcrl.bench.result import Result

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True}


@click.group()
def bench() -> None:
    """Measure what this machine allows and what is reached."""


def _files(command: Callable[..., None]) -> Callable[..., None]:
    png = click.option("--png", "png_path", default=None, help="Also draw the figures here.")
    text = click.option("--json", "json_path", default=None, help="Also write them to this file.")
    return text(png(command))


def _counts(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Return numbers of ranks that are written as 4,64,256."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 4,64,256") from None
    if min(counts) < 1:
        raise click.BadParameter(f"{value!r}: every number must be at least 1")
    return counts


def _finish(measure: Callable[[], Result], json_path: str | None, png_path: str | None) -> None:
    """Run a benchmark, publish its result and end this process with its exit code."""
    from hpcrl.bench.ranks import BenchError
    from hpcrl.bench.result import publish
    from hpcrl.config.load import ConfigError
    from hpcrl.node.slurm_env import LaunchError
    from hpcrl.topology import TopologyError

    try:
        result = measure()
    except (ConfigError, TopologyError, LaunchError, BenchError) as error:
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)
        codes = {LaunchError: exit_codes.LAUNCH, BenchError: exit_codes.INTERNAL}
        sys.exit(codes.get(type(error), exit_codes.USAGE))
    publish(result, json_path, png_path)


@bench.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@_files
@click.option("--seconds", default=60.0, show_default=True, help="Of steady training measured.")
@click.option("--warm-up-s", default=15.0, show_default=True, help="Of training before that.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def system(
    config: str,
    json_path: str | None,
    png_path: str | None,
    seconds: float,
    warm_up_s: float,
    overrides: tuple[str, ...],
) -> None:
    """Compare the training rate of CONFIG with the machine's ideal rate."""
    from hpcrl.bench.system import bench_system

    _finish(lambda: bench_system(config, overrides, seconds, warm_up_s), json_path, png_path)


@bench.command()
@_files
@click.option("--clients", callback=_counts, default="1,4,16", show_default=True)
@click.option("--seconds", default=0.5, show_default=True, help="Of each way in each round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--wait", type=click.Choice(["auto", "spin", "yield", "backoff"]), default="auto")
def wire(
    json_path: str | None,
    png_path: str | None,
    clients: tuple[int, ...],
    seconds: float,
    rounds: int,
    wait: str,
) -> None:
    """Compare step messages with a raw mpi4py ping-pong of the same bytes."""
    from hpcrl.bench.wire import bench_wire

    _finish(lambda: bench_wire(clients, seconds, rounds, wait, False), json_path, png_path)


@bench.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@_files
@click.option("--actors", default=4, show_default=True, help="Ranks that send steps.")
@click.option("--seconds", default=10.0, show_default=True, help="Of full load.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def inference(
    config: str,
    json_path: str | None,
    png_path: str | None,
    actors: int,
    seconds: float,
    overrides: tuple[str, ...],
) -> None:
    """Load one inference rank of CONFIG and compare it with the bare network."""
    from hpcrl.bench.inference import bench_inference

    _finish(lambda: bench_inference(config, overrides, actors, seconds), json_path, png_path)


@bench.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@_files
@click.option("--seconds", default=20.0, show_default=True, help="Of training.")
@click.option("--learners", default=2, show_default=True, help="Ranks that sum gradients.")
@click.option("--rounds", default=50, show_default=True, help="Of sums.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def learner(
    config: str,
    json_path: str | None,
    png_path: str | None,
    seconds: float,
    learners: int,
    rounds: int,
    overrides: tuple[str, ...],
) -> None:
    """Compare a flooded learner of CONFIG with a bare loop, and the gradient backends."""
    from hpcrl.bench.learner import bench_learner

    _finish(
        lambda: bench_learner(config, overrides, seconds, learners, rounds), json_path, png_path
    )


@bench.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@_files
@click.option("--seconds", default=30.0, show_default=True, help="Of training.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def checkpoint(
    config: str,
    json_path: str | None,
    png_path: str | None,
    seconds: float,
    overrides: tuple[str, ...],
) -> None:
    """Measure how long checkpoints and publishing weights hold the learner of CONFIG up."""
    from hpcrl.bench.checkpoint import bench_checkpoint

    _finish(lambda: bench_checkpoint(config, overrides, seconds), json_path, png_path)


@bench.command()
@_files
@click.option("--quick", is_flag=True, help="As short as it can be.")
def replay(json_path: str | None, png_path: str | None, quick: bool) -> None:
    """Compare a replay shard with memcpy, with O(N) methods and with its payload."""
    from hpcrl.bench.scripts import bench_replay

    _finish(lambda: bench_replay(quick), json_path, png_path)


@bench.command()
@_files
@click.option("--quick", is_flag=True, help="A small recording.")
@click.option("--pairs", default=3, show_default=True, help="Of training runs; 0: reading only.")
def recording(json_path: str | None, png_path: str | None, quick: bool, pairs: int) -> None:
    """Compare training with and without recording, and reading with plain h5py."""
    from hpcrl.bench.scripts import bench_recording

    _finish(lambda: bench_recording(quick, pairs), json_path, png_path)


@bench.command(name="all")
@_files
@click.option("--quick", is_flag=True, help="As short as it can be: for the exit code only.")
@click.option("--folder", type=click.Path(file_okay=False), help="Gets JSON and PNG of each.")
def everything(
    json_path: str | None, png_path: str | None, quick: bool, folder: str | None
) -> None:
    """Run every benchmark."""
    from pathlib import Path

    from hpcrl.bench.everything import bench_all, benchmarks, quick_benchmarks

    chosen = quick_benchmarks() if quick else benchmarks()
    _finish(lambda: bench_all(chosen, Path(folder) if folder else None), json_path, png_path)


@bench.command()
@_files
@click.option("--ranks", callback=_counts, default="4,64,256", show_default=True)
@click.option("--step-time-s", default=0.02, show_default=True, help="Of one environment.")
@click.option("--envs", default=8, show_default=True, help="Environments of an actor.")
@click.option("--seconds", default=20.0, show_default=True, help="Of steady training.")
@click.option("--wait", "waits", multiple=True, default=["auto"], show_default=True)
@click.option("--mode", "modes", multiple=True, default=["sleep"], show_default=True)
def scale(
    json_path: str | None,
    png_path: str | None,
    ranks: tuple[int, ...],
    step_time_s: float,
    envs: int,
    seconds: float,
    waits: tuple[str, ...],
    modes: tuple[str, ...],
) -> None:
    """Train with more and more actors of a synthetic environment (--mode sleep or compute)."""
    from hpcrl.bench.scale import bench_scale

    _finish(
        lambda: bench_scale(ranks, step_time_s, envs, seconds, waits, modes), json_path, png_path
    )


@bench.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@_files
@click.option("--nodes", callback=_counts, default="1,10,100,1000", show_default=True)
@click.option("--ranks-per-node", default=32, show_default=True)
@click.option("--cores-per-node", default=32, show_default=True)
@click.option("--gpus-per-node", default=0, show_default=True)
@click.option("--gpu-costs", default=None, help="What benchmarks/gpu_check.py wrote on a GPU.")
@click.option("--costs", default=None, help="A result file of this command; else measured here.")
@click.option("--latency-us", default=2.0, show_default=True, help="Of the network.")
@click.option("--gigabytes-per-s", default=12.0, show_default=True, help="Into a node.")
@click.option("--check", is_flag=True, help="Compare with real runs here, of --actors ranks.")
@click.option("--actors", callback=_counts, default="1,2,4,8", show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="Of each run of --check.")
@click.option("--warm-up-s", default=8.0, show_default=True, help="Of training before that.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def project(
    config: str,
    json_path: str | None,
    png_path: str | None,
    nodes: tuple[int, ...],
    ranks_per_node: int,
    cores_per_node: int,
    gpus_per_node: int,
    gpu_costs: str | None,
    costs: str | None,
    latency_us: float,
    gigabytes_per_s: float,
    check: bool,
    actors: tuple[int, ...],
    seconds: float,
    warm_up_s: float,
    overrides: tuple[str, ...],
) -> None:
    """Predict the rate of CONFIG on many nodes, and what saturates first."""
    from hpcrl.bench.project import Machine, bench_check, bench_project, read_gpu_costs
    from hpcrl.bench.simulator import Network

    def measure() -> Result:
        if check:
            return bench_check(config, overrides, actors, seconds, warm_up_s)
        network = Network(1e-6 * latency_us, 1e9 * gigabytes_per_s)
        machine = Machine(
            ranks_per_node, cores_per_node, gpus_per_node, network, read_gpu_costs(gpu_costs)
        )
        return bench_project(config, overrides, nodes, machine, costs)

    _finish(measure, json_path, png_path)
