"""`hpcrl check`: says in a table what works here, alone or as the ranks of a launched job.

The check runs in a process of its own, so that it ends whatever hangs in it: a launcher and an
MPI library that don't fit, a dead file system, a GPU driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hpcrl
from hpcrl import exit_codes
from hpcrl.comm.link import Group, Link
from hpcrl.comm.startup import FabricError, broadcast_json, gather_json, ping
from hpcrl.config.load import ConfigError, load_config
from hpcrl.config.root import Config
from hpcrl.node.slurm_env import check_world_size, is_launched, read_launch_info
from hpcrl.start.probes import (
    Finding,
    probe_configured_environment,
    probe_environments,
    probe_file_system,
    probe_horovod,
    probe_memory,
    probe_torch,
)

DEADLINE_S = 300.0
"""Longest time of the whole check."""

_WAIT_S = 120.0
"""Longest wait for another rank."""

_LARGE_PING_BYTES = 2**20
"""Far above what MPI libraries send eagerly, so that the other protocol is tried, too."""

Stage = Callable[[str], None]


def check_command(config: str | None, deadline_s: float = DEADLINE_S) -> int:
    """Run the check; print its table on rank 0.

    Args:
      config: a configuration file to check as well.
      deadline_s: when to give up.

    Returns:
      0 when all that is needed works; 2: bad configuration, environment or directory; 70: a
      broken installation; 71: the ranks don't form the job that was launched, or can't talk.
    """
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    os.write(writer, b"the start of Python\n")
    command = [
        sys.executable,
        "-m",
        "hpcrl.start.self_check",
        str(writer),
        *([config] if config else []),
    ]
    # A launcher may have left descriptors open for the rank that this process is.
    process = subprocess.Popen(command, close_fds=False)
    os.close(writer)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        stage = os.read(reader, 2**16).decode().splitlines()[-1]
        print(f"hpcrl: the check hung in {stage}: no end in {deadline_s:g} s", file=sys.stderr)
        return exit_codes.LAUNCH
    finally:
        os.close(reader)


def _check(config_path: str | None, stage: Stage) -> int:
    """Check as one rank; return the code that all ranks share."""
    config = None
    if config_path is not None:
        try:
            config = load_config(config_path)
        except ConfigError as error:
            print(f"hpcrl: {error}", file=sys.stderr)
            return exit_codes.USAGE
    stage("the start of MPI")
    try:
        from hpcrl.comm import transport
    except (ImportError, RuntimeError) as error:
        broken = Finding("MPI", f"can't be started: {error}", exit_codes.LAUNCH)
        findings = [_versions(), broken, *_probe_node(None, config, stage)]
        findings.append(_probe_files(config, stage))
        _print_table(findings)
        return max(finding.code for finding in findings)
    link = transport.MpiLink(deadline_s=_WAIT_S, max_message_bytes=2**30)
    try:
        code = _check_together(link, link.node_rank == 0, transport.library_facts(), config, stage)
        transport.finalize()
    except FabricError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        transport.abort(exit_codes.LAUNCH)
    except BaseException as error:
        print(f"hpcrl: rank {link.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        transport.abort(exit_codes.INTERNAL)
    return code


def _check_together(
    link: Link, speaks_for_node: bool, mpi: Mapping[str, Any], config: Config | None, stage: Stage
) -> int:
    """Collective: every rank reports, rank 0 prints.

    Raises:
      FabricError: another rank doesn't answer.
    """
    stage("messages between ranks")
    ring = {(link.rank + 1) % link.size, (link.rank - 1) % link.size} - {link.rank}
    ping(link, sorted(ring), _WAIT_S, _LARGE_PING_BYTES)
    ping(link, [0] if link.rank else range(1, link.size), _WAIT_S)
    world = link.group(range(link.size))
    if world is None:
        raise RuntimeError("every rank belongs to the world")
    talk = f"a ring of {link.size} ranks and rank 0 with each other one exchanged messages"
    library = mpi["library"].partition(",")[0]
    library += f"; MPI {mpi['standard']}, thread level {mpi['thread_level']}"
    findings = [_versions(), Finding("MPI", library), _launch(link.size)]
    findings += [Finding("ranks", talk)] if link.size > 1 else []
    findings += _probe_node(world, config, stage) if speaks_for_node else []
    stage("the reports of all ranks")
    host, cores = os.uname().nodename, sorted(os.sched_getaffinity(0))
    reports = gather_json(world, {"host": host, "cores": cores, "findings": findings})
    code = 0
    if link.rank == 0:
        table = [*_merge(reports), *_cores(reports), _probe_files(config, stage)]
        _print_table(table)
        code = max(finding.code for finding in table)
    stage("the verdict of rank 0")
    return int(broadcast_json(world, code, 0))


def _versions() -> Finding:
    return Finding("Python", f"{sys.version.split()[0]}, hpcrl {hpcrl.__version__}")


def _launch(world_size: int) -> Finding:
    """What the launcher meant, against MPI's world."""
    try:
        info = read_launch_info()
        problem = check_world_size(info, world_size)
    except ValueError as error:
        problem = str(error)
    if problem:
        return Finding("launch", problem, exit_codes.LAUNCH)
    if info.launcher == "none":
        return Finding("launch", "no launcher; `hpcrl train` would start its own mpirun")
    return Finding("launch", f"{world_size} ranks in one world, started by {info.launcher}")


def _probe_node(world: Group | None, config: Config | None, stage: Stage) -> list[Finding]:
    findings = []
    for name, probe in (
        ("torch", probe_torch),
        ("Horovod", lambda: probe_horovod(world)),
        ("environments", probe_environments),
        ("memory", probe_memory),
    ):
        stage(f"the look at {name}")
        findings.append(probe())
    if config is not None:
        stage(f"the look at {config.env.name}")
        findings.append(probe_configured_environment(config))
    return findings


def _probe_files(config: Config | None, stage: Stage) -> Finding:
    stage("the look at files")
    run_dir = config.run.dir if config is not None else ""
    return probe_file_system(Path(run_dir or "runs"))


def _merge(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return one line per subject where the ranks agree, else one per different finding."""
    who: dict[str, dict[Finding, list[str]]] = {}
    for rank, report in enumerate(reports):
        for entry in report["findings"]:
            finding = Finding(*entry)
            ranks = who.setdefault(finding.subject, {}).setdefault(finding, [])
            ranks.append(f"{report['host']} rank {rank}")
    merged = []
    for subject, found in who.items():
        for finding, ranks in found.items():
            if len(found) == 1:
                merged.append(finding)
                continue
            more = f" and {len(ranks) - 1} more" if ranks[1:] else ""
            # Ranks of one job that run different software can't understand each other.
            code = finding.code or (exit_codes.LAUNCH if subject in ("Python", "MPI") else 0)
            text = f"{ranks[0]}{more}: {finding.found}"
            merged.append(Finding(subject, text, code, finding.note))
    return merged


def _cores(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """How many cores the ranks of each node have together."""
    nodes: dict[str, list[list[int]]] = {}
    for report in reports:
        nodes.setdefault(report["host"], []).append(report["cores"])
    counts = Counter((len(set().union(*cores)), len(cores)) for cores in nodes.values())
    findings = []
    for (cores, ranks), n in counts.items():
        where = "this node" if len(nodes) == 1 else "one node" if n == 1 else f"each of {n} nodes"
        shared = "; ranks share cores" if ranks > cores else ""
        findings.append(Finding("cores", f"{cores} on {where}, ranks there: {ranks}{shared}"))
    return findings


def _print_table(findings: Sequence[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for finding in findings:
        state, style = ("FAILED", "bold red") if finding.code else ("ok", "green")
        if not finding.code and finding.note:
            state, style = "note", "yellow"
        table.add_row(Text(state, style), Text(finding.subject), Text(finding.found))
    # mpirun gives its ranks a terminal even where its own output goes to a file.
    Console(force_terminal=False if is_launched() else None).print(table)


def _main() -> None:
    """One rank's check: `python -m hpcrl.start.self_check DESCRIPTOR [CONFIG]`."""
    descriptor, *config = sys.argv[1:]

    def stage(name: str) -> None:
        os.write(int(descriptor), f"{name}\n".encode())

    code = _check(config[0] if config else None, stage)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    _main()
