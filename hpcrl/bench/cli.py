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

    try:
        result = measure()
    except (ConfigError, LaunchError, BenchError) as error:
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
