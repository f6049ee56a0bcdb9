"""Evaluator: weights → whole episodes → returns. Plays during training, and feeds nothing to it."""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt
import torch

from env_wrappers import EnvBatch
from hpcrl.acting.acting_rank import recorder_of
from hpcrl.acting.env_batches import make_batch
from hpcrl.brain import Brain
from hpcrl.comm.commands import CommandReceiver
from hpcrl.comm.link import wait_until
from hpcrl.comm.rounds import RoundReporter
from hpcrl.comm.stats import StatsReporter
from hpcrl.comm.weights import WeightsSubscriber
from hpcrl.comm.wire import Command
from hpcrl.evaluation.whole_episodes import (
    EpisodePlayer,
    RecordingPolicy,
    episode_quota,
    evaluation_options,
)
from hpcrl.job import Job, Seat

_MOST_ENVS = 8


def quota_of(seat: Seat) -> list[int]:
    """Return the episodes that each environment of an evaluator plays in a round."""
    evaluation = seat.config.evaluation
    return episode_quota(evaluation.episodes, evaluation.envs or _MOST_ENVS)


def env_ids(seat: Seat) -> npt.NDArray[np.int64]:
    """Return the global ids of this evaluator's environments, which follow those of training."""
    count = len(quota_of(seat))
    return seat.num_envs + seat.role_index * count + np.arange(count, dtype=np.int64)


def make_envs(seat: Seat) -> EnvBatch:
    """Build this evaluator's environments, with seeds of their own."""
    options, _ = evaluation_options(seat.config.env)
    seeds = [seat.seed("env", int(env_id)) % 2**31 for env_id in env_ids(seat)]
    return make_batch(seat.config.env, len(seeds), seeds, options)


class Evaluator:
    """An evaluator's messages, and the rounds that it plays."""

    def __init__(self, job: Job, brain: Brain, device: torch.device, envs: EnvBatch):
        self._job = job
        config, link = job.config.evaluation, job.link
        self._policy = RecordingPolicy(
            brain,
            job.env,
            envs.num_envs,
            device,
            job.config.inference.precision,
            job.seed("evaluator", job.role_index),
            greedy=config.greedy,
        )
        ids = env_ids(job)
        self._recorder = recorder_of(job, ids, np.ones(len(ids), bool))
        self._policy.recorder = self._recorder
        self._player = EpisodePlayer(envs, self._policy, config.max_episode_steps)
        learner = job.topology.learner_of[job.rank]
        self._weights = WeightsSubscriber(link, learner, self._policy.num_parameters)
        self._commands = CommandReceiver(link, learner)
        self._rounds = RoundReporter(link, job.root, config.episodes)
        self._stats = StatsReporter(link, job.root, every_s=0.0)
        self._asked = True
        self._stopped = False

    def stopped(self) -> bool:
        """Whether the learner has said STOP; asked at every step of a round."""
        self._job.link.pulse.beats += 1
        self._stopped = self._stopped or self._commands.poll() is Command.STOP
        return self._stopped

    def load_newer(self) -> bool:
        """Ask for newer weights; say whether the policy has got them."""
        if not self._asked:
            self._weights.renew()
            self._asked = True
        newer = self._weights.poll()
        if newer is None:
            return False
        # The next request waits until a round is due: it is answered with the newest there are.
        self._policy.load(newer, self._weights.version)
        self._asked = False
        return True

    def play(self) -> None:
        """Play a round and report it, unless the learner says STOP before its end."""
        begun_s = time.monotonic()
        played = self._player.play(quota_of(self._job), stopped=self.stopped)
        if played is None:
            return
        episodes = [episode for of_env in played for episode in of_env]
        seconds = time.monotonic() - begun_s
        link = self._job.link
        waiter = link.waiter(lambda: f"{link.label} (rank {link.rank}) waited to report a round")
        wait_until(self._rounds.sent, waiter)
        self._rounds.send(episodes, self._weights.version, self._weights.frames, seconds)
        if self._stats.sent():
            self._report()

    def finish(self) -> None:
        """Send what is left to report, and leave when the learner says EXIT."""
        link = self._job.link
        waiter = link.waiter(lambda: f"{link.label} (rank {link.rank}) waited for its end")
        wait_until(lambda: self._rounds.sent() and self._stats.sent(), waiter)
        self._report()
        wait_until(self._stats.sent, waiter)
        self._commands.say_done()
        # The learner may still be sending weights; it says EXIT when it isn't.
        wait_until(lambda: self._commands.poll() is Command.EXIT, waiter)
        self._weights.close()
        self._commands.close()
        if self._recorder:
            self._recorder.close()

    def _report(self) -> None:
        if self._recorder:
            self._stats.totals.update(self._recorder.totals())
        self._stats.send()


def run(job: Job, brain: Brain, device: torch.device, envs: EnvBatch) -> None:
    """Play rounds with the newest weights until the learner says STOP."""
    job.link.wait_policy = "backoff"  # nothing waits for this rank, and others want the core
    evaluator = Evaluator(job, brain, device, envs)
    job.link.pulse.stage = "rounds"
    # Filling a replay takes longer than a healthy peer may be silent.
    waiter = job.link.waiter(lambda: "never too long", math.inf)
    next_s = time.monotonic()
    while not evaluator.stopped():
        if time.monotonic() < next_s or not evaluator.load_newer():
            waiter.idle()
            continue
        waiter.progress()
        next_s = time.monotonic() + job.config.evaluation.every_s
        evaluator.play()
    evaluator.finish()
    envs.close()
