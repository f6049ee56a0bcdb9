"""What the root learner keeps for the user: episodes, metrics, progress, checkpoints, STATUS."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from hpcrl.comm.rounds import RoundCollector
from hpcrl.comm.stats import StatsCollector
from hpcrl.config.root import Config
from hpcrl.job import ACTOR_STAGES, GRADIENT_STAGES, INFERENCE_STAGES
from hpcrl.run.checkpoint import CheckpointError, Snapshot
from hpcrl.run.checkpoint_writer import CheckpointWriter
from hpcrl.run.counters import Counters, Meter, RollingReturns
from hpcrl.run.metrics import MetricsWriter
from hpcrl.run.progress import Progress
from hpcrl.run.rank_log import log
from hpcrl.run.run_dir import RunDir, RunDirError
from hpcrl.run.slowness import Slow
from hpcrl.run.stopping import lead_problem
from hpcrl.specs import ENV_FAILURES
from hpcrl.topology import Topology

_STATUS_EVERY_S = 10.0
_RETRY_S = 5.0


class Bookkeeper:
    """The only writer of the run directory.

    Args:
      config: of the run.
      topology: for the numbers of ranks.
      run_dir: an opened run directory.
      restart: restart index.
      backend: gradient backend in use, for STATUS.json.
      counters: totals so far; the learner advances them.
      returns: of the last 100 episodes, or of those of evaluation environments.
      collector: statistics of the acting ranks.
      rounds: of the evaluator ranks.
      lost_workers: workers that have died; inference ranks count their actors.

    Attributes:
      slow: tells the slow ranks of the job.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        run_dir: Path,
        restart: int,
        backend: str,
        counters: Counters,
        returns: RollingReturns,
        collector: StatsCollector,
        rounds: RoundCollector,
        lost_workers: AbstractSet[int] = frozenset(),
    ):
        self._config = config
        self._topology = topology
        self._dir = RunDir(run_dir)
        self.counters = counters
        self.returns = returns
        self._collector = collector
        self._rounds = rounds
        self._evaluated: dict[str, float] = {}
        self._lost_workers = lost_workers
        self.slow: Callable[[], Sequence[Slow]] = list
        self._metrics = MetricsWriter(run_dir, restart, config.metrics.tensorboard, counters)
        self._writer = CheckpointWriter(run_dir, config.checkpoint.keep)
        self.progress = Progress(str(run_dir), config.stop)
        self._facts = {"restart": restart, "backend": backend, "world_size": topology.world_size}
        # With evaluation environments the returns to show and to stop on are theirs.
        self._has_evaluation = getattr(config.agent, "evaluation_envs", 0) > 0
        self._exploring = RollingReturns()
        self._sums: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._steps = 0
        self._last_s = time.monotonic()
        now_s = self._last_s
        self._next_report_s = now_s + config.metrics.every_s
        self._next_checkpoint_s = now_s + (config.checkpoint.every_s or float("inf"))
        self._next_status_s = now_s + _STATUS_EVERY_S
        self._meter = Meter(self._totals({}))
        self._frozen = False
        self._lead_warned = False
        limits_s = (config.transport.deadline_s, config.run.silence_timeout_s or float("inf"))
        self._pause_s = min(config.checkpoint.pause_s, min(limits_s) / 2)
        self._paused_since_s: float | None = None
        self._failed_checkpoints = 0
        self._troubles: set[str] = set()
        self.checkpoint_copy_s = 0.0
        self._begun_step: int | None = None
        self.write_status("running")

    def write_status(self, state: str, **more: Any) -> None:
        """Replace STATUS.json."""
        status = self._dir.read_status() or {}
        self._dir.write_status(
            {
                **status,
                **self._facts,
                "state": state,
                "counters": self.counters.to_dict(),
                "checkpoint_step": self._writer.saved_step
                if self._writer.saved_step is not None
                else status.get("checkpoint_step"),
                **self.returns.values(),
                **{name.replace("/", "_"): value for name, value in self._evaluated.items()},
                "env_restarts": self._env_failures(),
                "lost_actors": self._lost_actors(),
                **more,
            }
        )

    def _lost_actors(self) -> int:
        """Actors or workers that have died since this start."""
        return int(self._collector.totals["lost_actors"]) + len(self._lost_workers)

    def poll(self) -> None:
        """Take in statistics and advance the clock."""
        self._collector.poll()
        self._rounds.poll()
        episodes = self._collector.take_episodes()
        if self._frozen:
            return
        now_s = time.monotonic()
        self.counters.wall_time_s += now_s - self._last_s
        self._last_s = now_s
        for episode in episodes:
            shown = episode.evaluation or not self._has_evaluation
            (self.returns if shown else self._exploring).extend([(episode.score, episode.steps)])
        self.counters.episodes += len(episodes)
        if (error := self._writer.take_error()) is not None:
            self._note_failed_checkpoint(error)
        elif not self.checkpoint_open:
            self._troubles.discard("checkpoint")

    def _note_failed_checkpoint(self, error: CheckpointError) -> None:
        """Say so and try again soon; train on meanwhile, or not."""
        now_s = time.monotonic()
        self._failed_checkpoints += 1
        every_s = self._config.checkpoint.every_s or float("inf")
        self._next_checkpoint_s = now_s + min(every_s, _RETRY_S)
        text = str(error)
        if self._config.checkpoint.on_error == "pause":
            self._paused_since_s = self._paused_since_s or now_s
            text += "; training pauses until it can be"
        self._say_once("checkpoint", text)

    def paused(self) -> bool:
        """Whether training waits for a checkpoint that could not be written yet.

        Raises:
          CheckpointError: for too long.
        """
        if self._paused_since_s is None:
            return False
        if self._writer.saved_step == self.counters.learner_steps:
            self._paused_since_s = None
            return False
        if time.monotonic() - self._paused_since_s > self._pause_s:
            raise CheckpointError(
                f"no checkpoint could be written for {self._pause_s:g} s (checkpoint.pause_s): the "
                "run ends; free space in its directory and start it again"
            )
        return True

    def _say_once(self, kind: str, text: str) -> None:
        """Warn of a trouble once until it is over."""
        if kind not in self._troubles:
            self._troubles.add(kind)
            log.warning(text)
            self.progress.say(f"warning: {text}")

    def _try(self, kind: str, act: Callable[[], None]) -> None:
        """Write what the run can do without; the next time may go well."""
        try:
            act()
            self._troubles.discard(kind)
        except RunDirError as error:
            self._say_once(kind, f"{error}; training goes on")

    def stopping(self) -> None:
        """Say that the run is at its end."""
        self._try("status", lambda: self.write_status("stopping"))

    def freeze(self) -> None:
        """Keep counters and returns as the last checkpoint has them.

        A resumed run then continues the very numbers that this one shows at its end.
        """
        self._frozen = True

    def note_step(self, values: Mapping[str, float]) -> None:
        """Note the figures of one learner step.

        A report shows means, the largest of what is named `_max`, and the last learning rate.
        """
        self._latest = {"learning_rate": values["learning_rate"]}
        for name, value in values.items():
            if name.endswith("_max"):
                self._maxima[name] = max(value, self._maxima.get(name, value))
            else:
                self._sums[name] += value
        self._steps += 1

    def report_when_due(self, stages: Mapping[str, float]) -> None:
        """Write metrics, progress and STATUS.json at their intervals."""
        now_s = time.monotonic()
        if now_s >= self._next_report_s and self._steps:
            self.report(stages)
            self._next_report_s = now_s + self._config.metrics.every_s
        if now_s >= self._next_status_s:
            self._try("status", lambda: self.write_status("running"))
            self._next_status_s = now_s + _STATUS_EVERY_S

    def report(self, stages: Mapping[str, float]) -> None:
        """Write one record of metrics and show it."""
        values: dict[str, float | None] = {
            name: total / max(self._steps, 1) for name, total in self._sums.items()
        }
        values |= self._maxima
        self._sums.clear()
        self._maxima.clear()
        self._steps = 0
        values |= self._latest
        values |= self.returns.values()
        if self._has_evaluation:
            values["exploring_mean_return_100"] = self._exploring.mean_return
        values |= self._rates(stages)
        values["checkpoint_copy_s"] = self.checkpoint_copy_s
        values["checkpoint_write_s"] = self._writer.write_s
        self._check_lead(self._writer.write_s + (values.get("replay_write_s") or 0.0))
        values["failed_checkpoints"] = self._failed_checkpoints
        evaluated = self._rounds.take()
        self._evaluated = evaluated or self._evaluated
        slow = self._note_slow()
        values["slow_ranks"] = len(slow)

        def write() -> None:
            record = self._metrics.write(self.counters, {**values, **evaluated}, slow)
            self.progress.update({**self._evaluated, **record})

        self._try("metrics", write)

    def _note_slow(self) -> dict[str, str]:
        """Name the slow ranks, for the record; say so where it is news."""
        slow = self.slow()
        for rank in slow:
            self._say_once(f"slow {rank.beat.rank}", rank.describe())
        self._troubles -= {t for t in self._troubles if t.startswith("slow ")} - {
            f"slow {rank.beat.rank}" for rank in slow
        }
        return {"slow_ranks_are": "; ".join(rank.describe() for rank in slow)} if slow else {}

    def _check_lead(self, checkpoint_s: float) -> None:
        """Warn once when the measured checkpoint leaves too little time before the deadline."""
        problem = lead_problem(self._config.run.deadline_lead_s, checkpoint_s)
        if problem and not self._lead_warned:
            self._lead_warned = True
            log.warning(problem)
            print(problem, flush=True)

    def _totals(self, stages: Mapping[str, float]) -> dict[str, float]:
        counters = self.counters
        return {
            **self._collector.totals,
            **{f"learner_{stage}_s": seconds for stage, seconds in stages.items()},
            "frames": counters.frames,
            "agent_steps": counters.agent_steps,
            "learner_steps": counters.learner_steps,
        }

    def _rates(self, stages: Mapping[str, float]) -> dict[str, float | None]:
        rate = self._meter.rates(self._totals(stages))
        batches = max(rate["batches"], 1e-9)
        topology = self._topology
        num_workers = len(topology.ranks_of("worker"))  # of a layout where they act themselves
        num_actors = num_workers or len(topology.ranks_of("actor"))
        num_inference = num_workers or len(topology.ranks_of("inference"))
        rows_per_batch = rate["rows"] / batches
        all_rows = num_actors * self._config.env.envs_per_actor / max(num_inference, 1)
        values: dict[str, float | None] = {
            f"{name}_per_s": rate[name]
            for name in ("frames", "agent_steps", "learner_steps", "env_steps", "unrolls")
        }
        values |= {
            "batch_rows": rows_per_batch,
            "batch_fill": rows_per_batch / max(all_rows, 1),
            "idle_rows_per_s": rate["idle_rows"],
            "row_wait_ms": 1e3 * rate["row_wait_s"] / batches,
            "restarted_envs": self._collector.totals["restarts"],
            "lost_actors": self._lost_actors(),
        }
        failures = self._env_failures()
        values["env_restarts"] = sum(failures.values())
        values |= {f"env_restarts_{kind}": count for kind, count in failures.items()}
        if self._config.recording.enabled:
            recorded = ("recorded_episodes", "dropped_episodes", "recorded_bytes")
            values |= {name: self._collector.totals[name] for name in recorded}
        roles = [
            ("actor", num_actors, ACTOR_STAGES),
            ("inference", num_inference, INFERENCE_STAGES),
        ]
        if topology.sharded:
            roles.append(("worker", num_workers, GRADIENT_STAGES))
            values["dropped_gradients"] = self._collector.totals["dropped_gradients"]
        for role, count, names in roles:
            values |= {f"{role}_{s}_share": rate[f"{role}_{s}_s"] / count for s in names}
        values |= {f"learner_{s}_share": rate[f"learner_{s}_s"] for s in stages}
        return values

    def _env_failures(self) -> dict[str, int]:
        """Failures of isolated environments since the start, by kind."""
        return {kind: int(self._collector.totals[f"env_{kind}"]) for kind in ENV_FAILURES}

    def checkpoint_due(self) -> bool:
        """Whether a periodic checkpoint should be taken; never while one is being written."""
        if time.monotonic() < self._next_checkpoint_s or self._writer.busy:
            return False
        if (error := self._writer.take_error()) is not None:
            self._note_failed_checkpoint(error)
            return False
        return True

    @property
    def checkpoint_open(self) -> bool:
        """Whether the last checkpoint that was begun is not durable (yet)."""
        return self._writer.saved_step != self._begun_step

    def checkpoint(self, snapshot: Callable[[], Mapping[str, Any]], state: dict[str, Any]) -> None:
        """Copy with `snapshot` now and write in the background."""
        start_s = time.monotonic()
        tensors = snapshot()
        full_state = {
            **state,
            "counters": self.counters.to_dict(),
            "returns": self.returns.to_list(),
        }
        self.checkpoint_copy_s = time.monotonic() - start_s
        self._begun_step = self.counters.learner_steps
        self._writer.submit(Snapshot(self._begun_step, tensors, full_state))
        self._next_checkpoint_s = start_s + (self._config.checkpoint.every_s or float("inf"))

    def last_checkpoint(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        state: dict[str, Any],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of a stop and return when it is durable.

        Args:
          snapshot: as in `checkpoint`.
          state: as in `checkpoint`.
          beat: called while it gets on.

        Raises:
          CheckpointError: it could not be written, however often it was tried.
        """
        end_s = time.monotonic() + self._pause_s
        with contextlib.suppress(CheckpointError):
            self._writer.wait(beat)  # for a write under way, which this one replaces
        while True:
            try:
                self.checkpoint(snapshot, state)
                self._writer.wait(beat)
                return
            except CheckpointError as error:
                if time.monotonic() + _RETRY_S > end_s:
                    raise
                self._say_once("checkpoint", f"{error}; tries again")
            beat()
            time.sleep(_RETRY_S)

    def close(self, state: str, verdict: str, stages: Mapping[str, float]) -> None:
        """Write the last record and the final STATUS.json.

        Raises:
          RunDirError: the latter can't be written.
        """
        self.poll()
        if self._steps or self._rounds.pending:
            self.report(stages)
        self.progress.close()
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._collector.close()
        self._rounds.close()
        self.write_status(state, verdict=verdict)
