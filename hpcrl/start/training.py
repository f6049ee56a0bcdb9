"""`hpcrl train`: as one rank of a launched job, or as the parent of a local mpirun."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from hpcrl import exit_codes
from hpcrl.compression import make_codec
from hpcrl.config.load import ConfigError, load_config
from hpcrl.config.root import Config
from hpcrl.layouts import check_layout
from hpcrl.node.slurm_env import LaunchError, is_launched, parse_time_unix_s, survives_deaths
from hpcrl.run.in_use import check_free, ranks_at_work
from hpcrl.run.resume import RunIsDone, check_not_done
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.run.stopping import StopSignal
from hpcrl.topology import TopologyError, local_world_size

_START_S = 900.0
"""Longest wait for all ranks to come to MPI and to open the run; in a large job thousands of
processes import the same files at once."""
_GRACE_S = 3.0
"""How long a rank stays where others may die, for its last messages to be taken in."""


def read_training_config(path: str, overrides: Sequence[str]) -> Config:
    """Load a configuration and settle the run directory.

    Raises:
      ConfigError: it can't be used.
    """
    config = load_config(path, overrides)
    check_together(config)
    if config.run.dir:
        return config
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return replace(config, run=replace(config.run, dir=f"runs/{Path(path).stem}-{stamp}"))


def check_together(config: Config) -> None:
    """Raise ConfigError for settings that are fine one by one but not together."""
    if config.env.envs_per_actor % config.env.groups:
        raise ConfigError(
            f"env.envs_per_actor {config.env.envs_per_actor} is not a multiple of env.groups "
            f"{config.env.groups}: each group steps an equal share"
        )
    _check_isolation(config)
    _check_teams(config)
    _check_codecs(config)
    try:
        check_layout(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    stop = config.stop
    if not (stop.frames or stop.agent_steps or stop.wall_time_s or stop.mean_return is not None):
        raise ConfigError(
            "no stop condition is set (stop.frames, stop.agent_steps, stop.wall_time_s or "
            "stop.mean_return): the run would never end"
        )
    if config.learner.optimizer.schedule == "linear" and not (stop.frames or stop.agent_steps):
        raise ConfigError(
            "learner.optimizer.schedule is linear, and neither stop.frames nor stop.agent_steps "
            "says where the learning rate reaches 0"
        )
    if config.run.deadline:
        try:
            parse_time_unix_s(config.run.deadline)
        except ValueError as error:
            raise ConfigError(f"run.deadline: {error}") from None


def _check_teams(config: Config) -> None:
    env = config.env
    if env.ranks_per_env > 1 and env.isolation != "none":
        raise ConfigError(
            f"env.ranks_per_env is {env.ranks_per_env} and env.isolation {env.isolation}: a child "
            "process is no rank of an MPI job; set env.isolation to none"
        )


def _check_codecs(config: Config) -> None:
    for key in ("transport", "replay"):
        try:
            make_codec(getattr(config, key).compression)
        except ValueError as error:
            raise ConfigError(f"{key}.compression: {error}") from None


def _check_isolation(config: Config) -> None:
    env, deadline_s = config.env, config.transport.deadline_s
    if env.isolation == "none":
        if env.python:
            raise ConfigError(
                f"env.python is {env.python}, which runs child processes only: set env.isolation "
                "to process"
            )
        return
    longest_s = env.step_timeout_s + env.start_timeout_s
    limits = {
        "transport.deadline_s": deadline_s,
        "run.silence_timeout_s": config.run.silence_timeout_s or math.inf,
    }
    for key, limit_s in limits.items():
        if longest_s >= limit_s:
            raise ConfigError(
                f"env.step_timeout_s {env.step_timeout_s:g} and env.start_timeout_s "
                f"{env.start_timeout_s:g} together reach {key} {limit_s:g}: an environment that "
                "hangs would end the job before it is restarted"
            )


def train_command(path: str, overrides: Sequence[str]) -> int:
    """Train; return the exit code of this process."""
    if is_launched():
        _rank(path, overrides)
    from hpcrl.start.demand import demand_of
    from hpcrl.start.local_launch import find_mpirun, mpirun_command, run_mpirun

    try:
        config = read_training_config(path, overrides)
        check_not_done(config)
        check_free(Path(config.run.dir))
        ranks = local_world_size(config.topology, demand_of(config), os.cpu_count() or 1)
        mpirun = find_mpirun()
    except RunIsDone as done:
        print(f"hpcrl: {done}")
        return exit_codes.DONE
    except (ConfigError, TopologyError, RunDirError) as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return exit_codes.USAGE
    except LaunchError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return exit_codes.LAUNCH
    arguments = ["train", path, *overrides, "--run.dir", config.run.dir]
    tolerant = config.run.fault_tolerance == "ulfm"
    command = mpirun_command(mpirun, ranks, arguments, fault_tolerant=tolerant)
    code = run_mpirun(command, ranks, lambda: _code_of(RunDir(config.run.dir)))
    with contextlib.suppress(RunDirError):
        if not ranks_at_work(Path(config.run.dir)):  # of another start, which came first
            RunDir(config.run.dir).settle_failure(f"mpirun ended with exit code {code}")
    return code


def _code_of(run_dir: RunDir) -> int:
    """Return the exit code of ranks that can't be asked any more, from what they wrote."""
    try:
        state = (run_dir.read_status() or {}).get("state")
    except RunDirError:
        return exit_codes.INTERNAL
    codes = {"done": exit_codes.DONE, "requeue": exit_codes.REQUEUE}
    return codes.get(str(state), exit_codes.INTERNAL)


def _rank(path: str, overrides: Sequence[str]) -> NoReturn:
    """This process is one rank: any failure that the others can't know of ends the job."""
    stop_signal = StopSignal()
    stop_signal.install()
    # Until the watchdog runs, no wait inside MPI has an end of its own: a rank that never comes, as
    # its node hangs in an import, would keep all others. This needs neither MPI nor Python's lock.
    faulthandler.dump_traceback_later(_START_S, exit=True)
    # Before any other import of mpi4py: nothing here may start MPI with other settings.
    from hpcrl.comm.transport import MpiLink, abort, finalize

    link = MpiLink(deadline_s=300.0, max_message_bytes=2**30, fault_tolerant=survives_deaths())
    try:
        from hpcrl.start.launch import run_rank

        code = run_rank(link, lambda: read_training_config(path, overrides), stop_signal)
        stop_signal.ignore()
        if survives_deaths():
            # Where ranks have died Open MPI's own end may never come. All know the code by now;
            # those that wait for a message of this rank's get it while it is still there.
            time.sleep(_GRACE_S)
        else:
            finalize()
    except BaseException as error:
        abort(_report(f"{link.label} (rank {link.rank})", error))
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process without the interpreter's own end.

    All is closed by now. Taking down torch takes seconds on a busy node, in which mpirun may be
    gone and the run started again; and HDF5 crashes where it could not close a file.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _report(who: str, error: BaseException) -> int:
    """Write why this rank ends the job to its log and to stderr; return the job's exit code."""
    from env_wrappers import EnvError, EnvFailure
    from hpcrl.comm.link import PeerLostError
    from hpcrl.comm.startup import FabricError
    from hpcrl.run.checkpoint import CheckpointError
    from hpcrl.run.rank_log import log, log_folder

    codes: dict[type[Exception], int] = {
        EnvError: exit_codes.USAGE,
        EnvFailure: exit_codes.ENVIRONMENTS,
        FabricError: exit_codes.LAUNCH,
        CheckpointError: exit_codes.STORAGE,
        RunDirError: exit_codes.STORAGE,
    }
    code = next((c for kind, c in codes.items() if isinstance(error, kind)), exit_codes.INTERNAL)
    details = f"{who} failed\n{traceback.format_exc()}"
    log.error(details)
    run_dir = log_folder()
    if run_dir is not None:
        RunDir(run_dir).note_failure(f"{who}: {type(error).__name__}: {error}")
    # Where it isn't an error of hpcrl the message says it all.
    short = code != exit_codes.INTERNAL or isinstance(error, PeerLostError)
    text = f"{who}: {error}" if short else details
    print(f"hpcrl: {text}", file=sys.stderr, flush=True)
    return code
