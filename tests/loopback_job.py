"""Whole jobs in one process: every rank is a thread that runs the code of `hpcrl train`."""

import logging
import threading
from contextlib import contextmanager

import numpy as np
import torch

from env_wrappers import EnvBatch
from hpcrl.acting.env_batches import make_batch
from hpcrl.comm.loopback import LoopbackLink
from hpcrl.learning.batches import assemble
from hpcrl.run.stopping import StopSignal
from hpcrl.start.launch import run_rank
from tests.acting_tools import Expected, row_of
from tests.loopback_runner import run_loopback

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HPCRL_THREADS")


class RecordedBatch(EnvBatch):
    """Environments that note what they give and what they are told."""

    def __init__(self, envs, log, before_step):
        self._envs, self._log, self._before_step = envs, log, before_step
        self.spec, self.num_envs = envs.spec, envs.num_envs
        self._given = None

    def reset(self):
        self._given = self._envs.reset()
        return self._given

    def step(self, actions):
        self._before_step(self)
        for row in range(self.num_envs):
            if self._given.valid[row]:
                self._log[row].add(row_of(self._given, row), actions[row].copy())
        self._given = self._envs.step(actions)
        return self._given

    @property
    def failures(self):
        return self._envs.failures

    def close(self):
        self._envs.close()


class JobRun:
    """What a job did.

    Attributes:
      histories: what each environment gave, in the order in which it was made.
      seeds: their seeds.
      unrolls: what each learner took, by rank, in order: one dict of fields per unroll.
      ahead: rows that all environments had given beyond those taken, at each learner step.
      world: the loopback world.
      links: the ranks' links.
      codes: exit codes by rank.
    """

    def __init__(self, monkeypatch, before_step=lambda envs: None, after_batch=lambda run: None):
        self.histories: list[Expected] = []
        self.seeds: list[int] = []
        self.unrolls: dict[int, list[dict]] = {}
        self.ahead: list[int] = []
        self.signals: dict[int, StopSignal] = {}
        self.world = None
        self.links: dict[int, LoopbackLink] = {}
        self.codes: list[int] = []
        self._lock = threading.Lock()
        self._before_step, self._after_batch = before_step, after_batch
        monkeypatch.setattr("hpcrl.roles.actor.make_batch", self._make)
        monkeypatch.setattr("hpcrl.learning.sources.assemble", self._record)
        monkeypatch.setattr("hpcrl.learning.gradients.assemble", self._record)
        # Python allows handlers in the main thread only; the flag is set by hand here.
        monkeypatch.setattr(StopSignal, "install", self._install(self.signals))
        # What a rank does to its process: here it is the process of all tests.
        monkeypatch.setattr("hpcrl.start.launch.log_to", lambda *arguments: None)
        monkeypatch.setattr("hpcrl.start.launch.start_watchdog", lambda *arguments: None)
        monkeypatch.setattr("hpcrl.node.torch_device.keep_freed_memory", lambda: None)
        monkeypatch.setattr("os.nice", lambda increment: 0)
        for name in THREAD_VARIABLES:
            monkeypatch.setenv(name, "1")

    @staticmethod
    def _install(signals):
        def install(self):
            signals[threading.get_ident()] = self

        return install

    def _make(self, config, num_envs, seeds):
        envs = make_batch(config, num_envs, seeds)
        size = sum(len(part["nvec"]) or len(part["low"]) for part in envs.spec["action"]["parts"])
        log = [Expected(size) for _ in range(num_envs)]
        with self._lock:
            self.histories += log
            self.seeds += list(seeds)
        return RecordedBatch(envs, log, self._before_step)

    def _record(self, views, slots, env, behaviour):
        fields = [{name: view[slot].copy() for name, view in views.items()} for slot in slots]
        with self._lock:
            self.unrolls.setdefault(threading.get_ident(), []).extend(fields)
            given = sum(len(history.rows) for history in self.histories)
            taken = sum(len(u["reward"]) - 1 for part in self.unrolls.values() for u in part)
            self.ahead.append(given - taken)
        self._after_batch(self)
        return assemble(views, slots, env, behaviour)

    @property
    def all_unrolls(self):
        return [unroll for part in self.unrolls.values() for unroll in part]

    def of_environment(self, env_id):
        """Its unrolls in the order in which they were taken."""
        return [unroll for unroll in self.all_unrolls if unroll["env_id"] == env_id]

    def signal(self, number, own=False):
        """What a signal to all ranks does, or to the one that calls."""
        mine = [self.signals[threading.get_ident()]]
        for stop_signal in mine if own else self.signals.values():
            stop_signal._signal = number

    def start(self, config, size):
        """Run the job to its end."""

        def body(link):
            self.world, self.links[link.rank] = link.world, link
            return run_rank(link, lambda: config)

        with _process_state_kept():
            self.codes = run_loopback(body, size)
        return self


@contextmanager
def _process_state_kept():
    threads, handlers = torch.get_num_threads(), logging.getLogger().handlers[:]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.getLogger().handlers[:] = handlers


def left_over(world, *planes):
    """Addresses on these planes with messages that nobody received."""
    return [address for address, mail in world.mail.items() if mail and address[0] in planes]


def history_of(run, unroll, path="obs:obs"):
    """The environment that gave an unroll of a counting environment, by what it observes."""
    identity = unroll[path][0][0]
    matches = [
        history
        for history, seed in zip(run.histories, run.seeds, strict=True)
        if np.float32(seed % 2**24) == identity
    ]
    assert len(matches) == 1
    return matches[0]
