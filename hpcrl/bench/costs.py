"""Single-core costs of the three kinds of work in a training run, each measured alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hpcrl.acting.env_batches import make_batch
from hpcrl.acting.policy import ActingPolicy
from hpcrl.brain import Brain
from hpcrl.comm.slots import Rows
from hpcrl.comm.wire import row_fields, unroll_layout
from hpcrl.config.root import Config
from hpcrl.job import LEARNER_STAGES, unrolls_per_learner_step
from hpcrl.learning.data_parallel import SingleLearner
from hpcrl.learning.epochs import EpochTrainer
from hpcrl.learning.trainer import Trainer
from hpcrl.node.torch_device import keep_freed_memory
from hpcrl.specs import EnvSpec
from hpcrl.timing import StageTimer
from hpcrl.types import UnrollBatch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one core per agent step.

    Attributes:
      environment_ms: stepping one group of environments.
      inference_ms: the network's forward pass and sampling, at `inference_rows` rows.
      training_ms: forward, backward and optimizer on the global batch.
      inference_rows: N.
    """

    environment_ms: float
    inference_ms: float
    training_ms: float
    inference_rows: int

    @property
    def total_ms(self) -> float:
        """All work that one agent step needs."""
        return self.environment_ms + self.inference_ms + self.training_ms

    def ideal_steps_per_s(self, cores: int) -> float:
        """Agent steps per second if `cores` did nothing else and never waited."""
        return 1e3 * cores / self.total_ms


class Environments:
    """One group of environments, stepped with random actions.

    Attributes:
      rows: environments of the group.
      spec: theirs.
    """

    def __init__(self, config: Config):
        self.rows = config.env.envs_per_actor // config.env.groups
        self._envs = make_batch(config.env, self.rows, list(range(self.rows)))
        self.spec = EnvSpec.from_json(self._envs.spec)
        rng = np.random.default_rng(0)
        self._actions = [_random_actions(self.spec, self.rows, rng) for _ in range(64)]
        self._steps = 0
        self._envs.reset()

    def step(self) -> None:
        """Step all of them."""
        self._envs.step(self._actions[self._steps % 64])
        self._steps += 1

    def close(self) -> None:
        """Release them."""
        self._envs.close()


def environment_ms(config: Config, seconds: float) -> tuple[EnvSpec, float]:
    """Step one group with random actions; return its spec and the cost per agent step."""
    envs = Environments(config)
    cost = _milliseconds_per_call(envs.step, seconds) / envs.rows
    envs.close()
    return envs.spec, cost


def _random_actions(spec: EnvSpec, rows: int, rng: np.random.Generator) -> np.ndarray:
    columns = []
    for part in spec.action.parts:
        if part.kind == "discrete":
            columns += [rng.integers(0, n, rows).astype(np.float64) for n in part.nvec]
        else:
            columns += [rng.uniform(-1, 1, rows) for _ in part.low]
    return np.stack(columns, 1).astype(spec.action.dtype)


def acting_policy(config: Config, spec: EnvSpec, rows: int) -> tuple[ActingPolicy, Rows]:
    """Return a policy for `rows` environments and a batch of noise of them all."""
    brain = Brain(config, spec)
    core_size = brain.make_network(0).state_size
    steps = config.learner.unroll_steps
    items = brain.window.items_per_unroll if brain.window else 0
    layout = unroll_layout(spec, brain.behaviour, steps, core_size, items)
    ids = np.arange(rows)
    policy = ActingPolicy(brain, spec, layout, steps, ids, _CPU, config.inference.precision, seed=0)
    batch = Rows(
        ids=ids,
        run_id=np.zeros(rows, np.int64),
        observation=_random_observation(spec, (rows,)),
        reward=np.zeros(rows, np.float32),
        terminated=np.zeros(rows, bool),
        truncated=np.zeros(rows, bool),
        final_observation=None,
    )
    return policy, batch


def inference_ms(config: Config, spec: EnvSpec, rows: int, seconds: float) -> float:
    """Choose actions for `rows` environments; return the cost per row."""
    policy, batch = acting_policy(config, spec, rows)

    def act() -> None:
        policy.act(batch)
        policy.record()

    return _milliseconds_per_call(act, seconds) / rows


def training_call(config: Config, spec: EnvSpec, learners: int) -> Callable[[], object]:
    """Return a function that takes a learner step on one learner's share of a batch of noise."""
    brain = Brain(config, spec)
    kind = EpochTrainer if brain.epochs else Trainer
    trainer = kind(brain, config.learner, SingleLearner(), _CPU, 2**62, seed=0)
    batch = random_batch(config, spec, brain, config.learner.batch_unrolls // learners)
    timer = StageTimer(LEARNER_STAGES)
    return lambda: trainer.step(batch, 0, 0, timer)


def training_ms(config: Config, spec: EnvSpec, learners: int, seconds: float) -> float:
    """Take learner steps on one learner's share of a batch; return the cost per agent step.

    With a replay that is per agent step stored, of which the ratio says how many there are.
    """
    call = _milliseconds_per_call(training_call(config, spec, learners), seconds)
    steps = unrolls_per_learner_step(config) * config.learner.unroll_steps / learners
    return call / steps


def random_batch(config: Config, spec: EnvSpec, brain: Brain, unrolls: int) -> UnrollBatch:
    """Return a batch of noise without episode ends: unrolls, or sampled items."""
    window = brain.window
    steps = window.burn_in_steps + window.loss_steps if window else config.learner.unroll_steps
    shape = (steps + 1, unrolls)
    fields = row_fields(spec, brain.behaviour)
    rows = {n: torch.zeros(*shape, *s.shape, dtype=_torch(s.dtype)) for n, s in fields.items()}
    names = ("reward", "terminated", "start", "final", "previous_action", "action")
    return UnrollBatch(
        observation={
            path: torch.from_numpy(leaf) for path, leaf in _random_observation(spec, shape).items()
        }
        if not any(leaf.stack > 1 for leaf in spec.observation.values())
        else _random_stacks(spec, shape),
        behaviour={"weight": torch.ones(shape)}
        if window
        else {name: rows[f"behaviour:{name}"] for name in brain.behaviour},
        policy_version=rows["policy_version"],
        core_state=brain.make_network(0).initial_state(unrolls),
        **{name: rows[name] for name in names},
    )


def _torch(dtype: str) -> torch.dtype:
    result: torch.dtype = torch.from_numpy(np.zeros(0, dtype)).dtype
    return result


def _random_stacks(spec: EnvSpec, leading: tuple[int, ...]) -> dict[str, torch.Tensor]:
    stacks = {}
    for path, leaf in spec.observation.items():
        extra = (leaf.stack,) if leaf.stack > 1 else ()
        shape = (*leading, *extra, *leaf.array.shape)
        stacks[path] = torch.from_numpy(noise(shape, leaf.array.dtype))
    return stacks


def _random_observation(spec: EnvSpec, leading: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {
        path: noise((*leading, *leaf.array.shape), leaf.array.dtype)
        for path, leaf in spec.observation.items()
    }


def noise(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of random values, of zeros where the dtype has no natural ones."""
    rng = np.random.default_rng(0)
    if dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    return (
        rng.standard_normal(shape).astype(dtype) if dtype == "float32" else np.zeros(shape, dtype)
    )


def _milliseconds_per_call(call: Callable[[], object], seconds: float) -> float:
    """Return the median over chunks, so that a hiccup of the machine doesn't count."""
    call()
    start_s = time.perf_counter()
    call()
    once_s = max(time.perf_counter() - start_s, 1e-6)
    chunk = max(1, int(seconds / 10 / once_s))
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        for _ in range(chunk):
            call()
        times.append((time.perf_counter() - start_s) / chunk)
    return 1e3 * float(np.median(times))


def measure(config: Config, rows: int, learners: int, seconds: float) -> Costs:
    """Measure all three costs with one thread."""
    keep_freed_memory()
    torch.set_num_threads(1)
    spec, environment = environment_ms(config, seconds)
    return Costs(
        environment,
        inference_ms(config, spec, rows, seconds),
        training_ms(config, spec, learners, seconds),
        rows,
    )
