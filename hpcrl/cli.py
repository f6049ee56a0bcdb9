"""The `hpcrl` command. Each sub-command imports what it needs, when it runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

import hpcrl
from hpcrl import exit_codes
from hpcrl.bench.cli import bench

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcrl.__version__, prog_name="hpcrl")
def main() -> None:
    """Distributed reinforcement learning as one MPI job."""


def _fail(error: Exception, code: int) -> None:
    with contextlib.suppress(OSError):  # the code counts where nothing can be written
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)
    sys.exit(code)


@main.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--resume", default=None, help="auto, never, or the path of a checkpoint.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def train(config: str, resume: str | None, overrides: tuple[str, ...]) -> None:
    """Train as CONFIG says; --section.key VALUE changes it.

    Under srun or mpirun this process is one rank. Without a launcher it starts its own mpirun.
    """
    from hpcrl.start.training import train_command

    extra = ("--run.resume", resume) if resume else ()
    sys.exit(train_command(config, (*overrides, *extra)))


@main.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--nodes", default=1, show_default=True, help="Nodes of the allocation.")
@click.option("--ranks-per-node", type=int, default=None, help="Ranks on each node.")
@click.option("--gpus-per-node", default=0, show_default=True, help="GPUs of each node.")
@click.option("--cores-per-node", default=0, help="Cores of each node; 0: unknown.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def plan(
    config: str,
    nodes: int,
    ranks_per_node: int | None,
    gpus_per_node: int,
    cores_per_node: int,
    overrides: tuple[str, ...],
) -> None:
    """Print which rank would take which role; needs no MPI."""
    from hpcrl.config.load import ConfigError, load_config
    from hpcrl.start.demand import check_shares, demand_of
    from hpcrl.start.plan_numbers import plan_lines
    from hpcrl.start.training import check_together
    from hpcrl.topology import TopologyError, local_world_size, plan_topology, uniform_node_map

    try:
        loaded = load_config(config, overrides)
        demand = demand_of(loaded)
        ranks = ranks_per_node or local_world_size(loaded.topology, demand, cores_per_node)
        node_map = uniform_node_map(nodes, ranks, gpus_per_node, cores_per_node)
        topology = plan_topology(loaded.topology, node_map, demand)
        check_together(loaded)
        check_shares(loaded, topology)
    except (ConfigError, TopologyError) as error:
        _fail(error, exit_codes.USAGE)
        return
    print(topology.table())
    for line in plan_lines(loaded, topology):
        print(line)


@main.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
def status(run: Path) -> None:
    """Say how the run in directory RUN stands, during and after it."""
    from rich.console import Console

    from hpcrl.run.run_dir import RunDirError
    from hpcrl.run.status import status_table

    try:
        Console().print(status_table(run))
    except RunDirError as error:
        _fail(error, exit_codes.USAGE)


@main.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.option("--wait-s", default=15.0, show_default=True, help="For the answers of all ranks.")
def stacks(run: Path, wait_s: float) -> None:
    """Show where each rank of the running job in RUN is in its code.

    Works from any node that sees RUN. Exits with 70 when a rank does not answer.
    """
    from hpcrl.run.run_dir import RunDirError
    from hpcrl.run.status import show_stacks

    try:
        sys.exit(show_stacks(run, wait_s))
    except RunDirError as error:
        _fail(error, exit_codes.USAGE)


@main.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
def advise(run: Path) -> None:
    """Say which side of the run in directory RUN waits, and which setting to change."""
    from hpcrl.run.advise import advice_lines
    from hpcrl.run.run_dir import RunDirError

    try:
        print("\n".join(advice_lines(run)))
    except RunDirError as error:
        _fail(error, exit_codes.USAGE)


@main.command(context_settings=_PASS_THROUGH)
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--nodes", default=1, show_default=True, help="Nodes of the allocation.")
@click.option("--time", "time_limit", required=True, help="Wall limit: H:MM:SS, D-HH or minutes.")
@click.option("--ranks-per-node", default=16, show_default=True)
@click.option("--gpus-per-node", default=0, show_default=True)
@click.option("--cpus-per-rank", default=1, show_default=True)
@click.option("--site", default="", help="Site file: a name in slurm/sites/, or a path.")
@click.option("--lead-s", default=300, show_default=True, help="Stop this long before the limit.")
@click.option("--sbatch", multiple=True, help="A further option of sbatch; can be repeated.")
@click.option("--submit", "really", is_flag=True, help="Give the script to sbatch.")
@click.option("--dry-run", is_flag=True, help="Only show it: the default.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def submit(
    config: str,
    nodes: int,
    time_limit: str,
    ranks_per_node: int,
    gpus_per_node: int,
    cpus_per_rank: int,
    site: str,
    lead_s: int,
    sbatch: tuple[str, ...],
    really: bool,
    dry_run: bool,
    overrides: tuple[str, ...],
) -> None:
    """Show a batch script that trains as CONFIG says; --submit also gives it to sbatch."""
    from hpcrl.config.load import ConfigError, load_config
    from hpcrl.start.submit import JobRequest, submit_command
    from hpcrl.start.training import check_together

    try:
        check_together(load_config(config, overrides))
    except ConfigError as error:
        _fail(error, exit_codes.USAGE)
    request = JobRequest(
        config,
        nodes,
        time_limit,
        ranks_per_node,
        gpus_per_node,
        cpus_per_rank,
        site,
        lead_s,
        overrides,
        sbatch,
    )
    package = Path(hpcrl.__file__).resolve().parents[1]
    sys.exit(submit_command(request, package, dry_run or not really))


@main.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.option("--exit-code", type=int, default=None, help="Of the launch that has ended.")
@click.option("--lost", is_flag=True, help="Before the first launch after a requeue instead.")
@click.option("--job", default="", help="Only launches of the same job count.")
@click.option("--requeues", default=0, show_default=True, help="Of this job so far.")
@click.option("--max-restarts", default=100, show_default=True)
@click.option("--max-fruitless", default=2, show_default=True)
def verdict(
    run: Path,
    exit_code: int | None,
    lost: bool,
    job: str,
    requeues: int,
    max_restarts: int,
    max_fruitless: int,
) -> None:
    """For batch scripts: say what to do after a launch of RUN has ended.

    Prints done, again, requeue or stop, and the exit code for the script.
    """
    from hpcrl.run.run_dir import RunDirError
    from hpcrl.run.verdict import judge_lost, judge_run

    if (exit_code is None) != lost:
        raise click.UsageError("give either --exit-code or --lost")
    try:
        if exit_code is None:
            result = judge_lost(run, job, max_restarts, max_fruitless, requeues)
        else:
            result = judge_run(run, exit_code, job, max_restarts, max_fruitless, requeues)
    except RunDirError as error:
        _fail(error, exit_codes.INTERNAL)
        return
    # First what the script acts on: the job's output may be on a file system that is full.
    print(result.action, result.exit_code, flush=True)
    with contextlib.suppress(OSError):
        print(f"hpcrl: {result.action}: {result.reason}", file=sys.stderr, flush=True)


@main.command(context_settings=_PASS_THROUGH)
@click.argument("key")
@click.argument("config", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def value(key: str, config: str, overrides: tuple[str, ...]) -> None:
    """For batch scripts: print the value of KEY, such as run.dir, under CONFIG and its options."""
    from hpcrl.config.load import ConfigError, flatten, load_config, to_dict

    try:
        values = flatten(to_dict(load_config(config, overrides)))
        if key not in values:
            raise ConfigError(f"no key {key!r} has one value; docs/configuration.md has them all")
    except ConfigError as error:
        _fail(error, exit_codes.USAGE)
        return
    print(values[key])


@main.command(name="eval")
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.option("--episodes", default=10, show_default=True, type=click.IntRange(1))
@click.option("--envs", default=8, show_default=True, type=click.IntRange(1))
@click.option("--greedy/--sample", default=True, help="Best action, or sampled as in training.")
@click.option("--checkpoint", default=None, help="A checkpoint; the newest good one if absent.")
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--max-steps",
    type=click.IntRange(1),
    default=None,
    help="Cut an episode off after so many agent steps; evaluation.max_episode_steps if absent.",
)
@click.option(
    "--record/--no-record", default=True, help="Write episodes and table to RUN/evaluations."
)
@click.option(
    "--videos",
    type=click.IntRange(0),
    default=None,
    help="Of how many of the best episodes; 1 if absent and they are recorded.",
)
def evaluate(
    run: Path,
    episodes: int,
    envs: int,
    greedy: bool,
    checkpoint: str | None,
    seed: int,
    max_steps: int | None,
    record: bool,
    videos: int | None,
) -> None:
    """Play whole episodes with a checkpoint of RUN; needs no MPI."""
    from hpcrl.evaluation.play import EvaluationError, evaluate_run
    from hpcrl.evaluation.result import print_evaluation

    videos = int(record) if videos is None else videos
    try:
        result = evaluate_run(
            run, episodes, envs, greedy, checkpoint, seed, record, videos, max_steps
        )
    except EvaluationError as error:
        _fail(error, exit_codes.USAGE)
        return
    print_evaluation(result)
    if result.losses:
        sys.exit(exit_codes.STORAGE)


@main.command()
@click.argument("run", type=click.Path(file_okay=False))
@click.option("--partial", is_flag=True, help="Use what can be read of a damaged recording.")
@click.option("--check", is_flag=True, help="Only say whether all that an index shows is there.")
def index(run: str, partial: bool, check: bool) -> None:
    """Make RUN/trajectories/index.h5, in which all segments look like one file."""
    from analysis.index import main as index_main

    sys.exit(index_main([run, *["--partial"] * partial, *["--check"] * check]))


@main.command()
@click.argument("run", type=click.Path(file_okay=False))
@click.option("--format", "kind", required=True, type=click.Choice(["minari", "d4rl", "robomimic"]))
@click.option("-o", "--output", required=True, type=click.Path())
@click.option("--partial", is_flag=True, help="Use what can be read of a damaged recording.")
def export(run: str, kind: str, output: str, partial: bool) -> None:
    """Write the recorded episodes of RUN as another kind of dataset."""
    from analysis.export import main as export_main

    sys.exit(export_main([run, "--format", kind, "-o", output, *["--partial"] * partial]))


@main.command()
@click.argument("config", type=click.Path(dir_okay=False), required=False)
def check(config: str | None) -> None:
    """Say what works here: MPI, Horovod, torch devices, environments, file system."""
    from hpcrl.start.self_check import check_command

    sys.exit(check_command(config))


@main.command()
@click.argument("name", required=False)
@click.option("--num-envs", default=8, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.0, 60.0))
@click.argument("options", nargs=-1)
def envs(name: str | None, num_envs: int, seconds: float, options: tuple[str, ...]) -> None:
    """List the environment families; with NAME (such as atari or gym:Ant-v5), look at one.

    It is then made with OPTIONS (each KEY=VALUE, as env.options has them) and stepped here.
    """
    from env_wrappers import EnvError
    from hpcrl.start.environments import print_families, print_one

    try:
        if name is None:
            print_families()
        else:
            print_one(name, options, num_envs, seconds)
    except EnvError as error:
        _fail(error, exit_codes.USAGE)


main.add_command(bench)


def run(arguments: list[str] | None = None) -> Any:
    """Run the command line."""
    return main(arguments, prog_name="hpcrl")
