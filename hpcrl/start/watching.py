"""Begins a rank's heartbeat, and on some ranks the watch over all."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence

from hpcrl import exit_codes
from hpcrl.durable import reason
from hpcrl.job import Seat
from hpcrl.run.heartbeat import Beat
from hpcrl.run.node_table import NodeTable, Offer
from hpcrl.run.rank_log import log
from hpcrl.run.run_dir import RunDir
from hpcrl.run.watchdog import Silence, Watchdog, tick_s
from hpcrl.topology import ROLES

_ABORT_S = 10.0


def start_watchdog(
    seat: Seat, name: str, own: Offer, offers: Sequence[list[str]]
) -> Watchdog | None:
    """Begin this rank's heartbeat; one rank of each role watches all of them.

    Args:
      seat: this rank's.
      name: of its role, for people.
      own: memory that this rank offers to its node.
      offers: facts of every rank's offer.
    """
    topology, run = seat.topology, seat.config.run
    tick = tick_s(run.silence_timeout_s)
    beat = Beat(seat.rank, name, os.uname().nodename, os.getpid(), seat.restart, tick)
    watchers = [topology.ranks_of(role)[:1] for role in ROLES]
    silence = None
    if run.silence_timeout_s and any(seat.rank in first for first in watchers):
        start_s = seat.config.transport.start_deadline_s
        silence = Silence(run.silence_timeout_s, start_s)

    def end_job(why: str) -> None:
        from hpcrl.comm.transport import abort

        RunDir(seat.run_dir).note_failure(why)
        log.error(why)
        print(f"hpcrl: {why}", file=sys.stderr, flush=True)
        # If the loop is stuck inside MPI, an abort from here may be stuck, too.
        faulthandler.dump_traceback_later(_ABORT_S, exit=True)
        abort(exit_codes.INTERNAL)

    try:
        return Watchdog(
            seat.link.pulse,
            beat,
            seat.run_dir,
            _open_table(seat, own, offers),
            silence,
            run.silence_timeout_s,
            end_job,
            seat.link.lost_ranks,
            finds_slow=seat.rank == seat.root,
        )
    except OSError as error:
        log.warning("no heartbeat of this rank (%s)", reason(error))
        return None


def _open_table(seat: Seat, own: Offer, offers: Sequence[list[str]]) -> NodeTable:
    """The table of this rank's node; one for itself where it can't see the others' memory."""
    index = seat.topology.node_of[seat.rank]
    ranks = seat.topology.nodes[index].ranks
    slot, num_ranks = ranks.index(seat.rank), seat.topology.world_size
    name = f"node-{index:05d}"
    try:
        return NodeTable(seat.run_dir, name, offers[ranks[0]], len(ranks), slot, num_ranks)
    except OSError:
        return NodeTable(seat.run_dir, f"{name}-{slot:05d}", own.facts, 1, 0, num_ranks)
