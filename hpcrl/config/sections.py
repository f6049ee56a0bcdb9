"""The sections of a configuration file, one frozen dataclass each; no torch, no MPI."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hpcrl.config.types import (
    STRICT,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
)

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """The run as a whole."""

    dir: str = ""
    """Run directory; empty: `runs/<config name>-<date>`."""
    seed: NonNegative = 1
    """Every random stream derives from this, the role and its index, never from rank numbers."""
    resume: str = "auto"
    """auto: continue the newest good checkpoint of the run directory if there is one;
    never: refuse a directory that already holds a run; or the path of a checkpoint."""
    deadline: str = ""
    """Wall-clock end as ISO date and time or Unix seconds; the run checkpoints and exits 75
    `deadline_lead_s` before it. `HPCRL_JOB_END` gives the same. Empty: none."""
    deadline_lead_s: NonNegativeFloat = 120.0
    """Seconds before the deadline at which the agreed stop begins."""
    fault_tolerance: Literal["off", "ulfm"] = "off"
    """ulfm: `hpcrl train` starts its mpirun with `--with-ft ulfm` (Open MPI 5): the death of an
    actor or worker then costs its environments only, but in layout: sync and with
    `learner.stale_unrolls: wait`. Under a launcher of your own its options decide."""
    silence_timeout_s: NonNegativeFloat = 600.0
    """A rank whose loop stands still for this long has its name, and all ranks' stacks, written to
    the run directory, and the job ends with 70. 0: never; `hpcrl status` names it all the same.
    Longer than `env.step_timeout_s` and `env.start_timeout_s` together, where isolated."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvConfig:
    """The environment and how many copies an actor steps."""

    name: str = "gym:CartPole-v1"
    """`family:name`, such as atari:Breakout or gym:CartPole-v1, or `module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the family, such as {frame_stack: 4} for Atari."""
    envs_per_actor: Positive = 8
    """E: environments that one actor (or worker) rank steps."""
    groups: Positive = 2
    """Groups of an actor's environments; one steps while the others wait for actions."""
    ranks_per_env: Positive = 1
    """P: ranks that step each environment together, over a communicator of their own. Above 1
    the environment is the user's function, which takes it as `communicator`."""
    isolation: Literal["none", "process"] = "none"
    """process: each group lives in a child process, which is started again when an environment
    raises, gives garbage, hangs or crashes; none: in the actor itself."""
    python: str = ""
    """Interpreter of the child processes, with numpy, gymnasium and the environment's packages;
    empty: hpcrl's own. Needs `isolation: process`."""
    step_timeout_s: PositiveFloat = 60.0
    """Isolated: a group that takes longer for a step or reset hangs, and is made anew."""
    start_timeout_s: PositiveFloat = 120.0
    """Isolated: longest time to start a child process and make its environments."""
    max_restarts_per_hour: NonNegative = 60
    """Isolated: restarts of one child process within an hour, after which the job ends (72)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NetworkConfig:
    """The agent's network; one function serves acting and learning."""

    torso: Literal["mlp", "small_cnn", "nature_cnn", "impala_resnet"] = "mlp"
    """mlp for vectors; nature_cnn or impala_resnet for images, small_cnn for those of a few
    cells, such as MinAtar's."""
    hidden_sizes: tuple[Positive, ...] = (64, 64)
    """Layers of the MLP torso, or the dense layers after a convolutional torso."""
    activation: Literal["relu", "tanh"] = "relu"
    """Non-linearity of the dense layers."""
    shared_torso: bool = True
    """One torso for policy and value, or one each."""
    core: Literal["none", "lstm"] = "none"
    """Recurrent core between torso and heads."""
    core_size: Positive = 256
    """Units of the recurrent core."""
    use_previous_action: bool = False
    """Feed the previous action (one-hot when discrete) to the core or heads."""
    use_previous_reward: bool = False
    """Feed the previous reward to the core or heads."""
    previous_reward_clip: NonNegativeFloat = 1.0
    """Largest magnitude of the previous reward that is fed; 0: not clipped."""
    continuous: Literal["tanh_normal", "clipped_normal"] = "tanh_normal"
    """Distribution of continuous actions."""
    state_independent_std: bool = False
    """Continuous actions: one learned log-std per component instead of a network output."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """Gradient descent on the flat parameter buffer."""

    name: Literal["adam", "rmsprop"] = "adam"
    """adam or rmsprop, as torch.optim defines them."""
    learning_rate: PositiveFloat = 6e-4
    """Step size at the start."""
    schedule: Literal["constant", "linear"] = "constant"
    """linear: the learning rate falls to 0 at `stop.agent_steps` (or `stop.frames`)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam: decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam: decay of the second moment."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """RMSProp: decay of the squared gradient."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """RMSProp: momentum."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root AFTER bias correction (torch's convention; Keras adds it before, so
    its value is sqrt(1 - beta2^t) times smaller here at step t)."""
    max_grad_norm: NonNegativeFloat = 40.0
    """Global-norm clip of the averaged gradient, after the reduction (in layout async_gradient of
    each worker's gradient, before it is sent); 0: off."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LearnerConfig:
    """Learner ranks: batch, optimizer and gradient reduction."""

    batch_unrolls: Positive = 32
    """B: unrolls in the GLOBAL batch; each learner takes an equal share. With a replay these
    are sampled items: sequences (r2d2) or single transitions (apex). In layout async_gradient:
    unrolls of each gradient of one worker, a multiple of `env.envs_per_actor`."""
    unroll_steps: Positive = 20
    """T: agent steps of one unroll (stored with one more row for the bootstrap)."""
    micro_batches: Positive = 1
    """Parts of a learner's batch whose gradients are summed one after the other; messages
    are served in between. The result is the same up to rounding."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    precision: Precision = "float32"
    """Autocast of the forward pass; float16 adds dynamic loss scaling."""
    backend: Literal["auto", "horovod", "torch", "mpi"] = "auto"
    """Gradient reduction: Horovod, torch.distributed (gloo or nccl) or MPI Allreduce;
    auto: horovod where it is installed, else mpi."""
    queue_unrolls: NonNegative = 0
    """Receive slots of a learner, the on-policy queue; 0: twice its share of the batch, up to three
    times where its environments complete more unrolls at once, or with a replay what arrives
    during one step."""
    max_policy_lag: NonNegative | None = None
    """How many learner steps behind the newest weights the oldest row of an unroll may be when it
    is trained on; none: no bound. Asynchronous layouts need at least 1."""
    stale_unrolls: Literal["drop", "wait"] = "drop"
    """What becomes of `max_policy_lag`: unrolls that are older are dropped and counted
    (`stale_unrolls_dropped`), or acting waits for newer weights before it begins an unroll that
    would be (`inference_held_share`, `idle_rows_per_s`)."""
    max_gradient_lag: NonNegative | Literal["auto"] = "auto"
    """Layout async_gradient: a gradient is dropped, and counted, where the shard has taken more
    than this many others since the parameters that it was computed from; auto: four times the
    number of workers."""
    compile: bool = False
    """Compile the network with torch.compile: pays on GPUs, takes up to minutes at the first step
    and needs a C++ compiler. Without effect where workers compute gradients."""
    threads: NonNegative = 0
    """torch threads of a learner rank; 0: its share of the node's cores, in
    `sync` with images of all."""
    check_parameters_every: NonNegative = 100
    """Learner steps between comparisons of all learners' parameters; 0: never."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReplayConfig:
    """The prioritized replay, spread over the learners' memory; only for `layout: replay`."""

    capacity_unrolls: Positive = 10_000
    """Unrolls that all learners together store; each takes an equal share."""
    min_size_unrolls: Positive = 500
    """Unrolls that all learners together must have before the first step, also after a resume."""
    ratio: PositiveFloat = 0.75
    """Items trained on per item stored, held exactly: whichever of acting and learning is
    faster waits for the other."""
    priority_exponent: Annotated[float, Field(ge=0, le=2)] = 0.9
    """Items are drawn in proportion to priority^this; 0: uniformly."""
    importance_exponent: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Strength of the correction for that, 0 to 1 (beta)."""
    min_priority: Annotated[float, Field(ge=1e-40, le=1.0), Number] = 1e-6
    """Floor of every priority: an item with priority 0 would never be drawn again."""
    compression: Literal["none", "zlib", "lz4"] = "none"
    """Of stored observations; saves memory, costs time at every draw."""
    memory_bytes: NonNegative = 0
    """Memory that a learner's share may take; 0: what its node has free, divided by the
    learners on it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InferenceConfig:
    """Inference ranks: batching and the unrolls in flight."""

    max_batch_rows: NonNegative = 0
    """A batch is dispatched at this many rows; 0: half of the rank's rows, as with two
    groups one half can be stepping."""
    max_wait_s: NonNegativeFloat = 0.002
    """Longest time that the first waiting row waits for the batch to fill."""
    credits_unrolls: NonNegative = 0
    """Unrolls on the way to the learner before acting is held back; 0: the learner's batch
    divided by its inference ranks, or with a replay what it completes during one step."""
    precision: Precision = "float32"
    """Autocast of the forward pass."""
    cuda_graphs: bool = True
    """On a GPU batches are padded to powers of two, each of which is captured as a CUDA graph."""
    threads: NonNegative = 0
    """torch threads of an inference rank; 0: its share of the node's cores."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TransportConfig:
    """Messages between ranks."""

    wait: Literal["auto", "spin", "yield", "backoff"] = "auto"
    """How a rank waits; auto: backoff when a node has more threads of ranks, and isolated children,
    than cores, else yield."""
    deadline_s: PositiveFloat = 600.0
    """Longest wait for a message of a healthy peer; past it the job ends with a report."""
    start_deadline_s: PositiveFloat = 300.0
    """Longest wait at start-up, while peers import and build their environments."""
    max_message_bytes: Annotated[int, Field(gt=0, le=2**31 - 1)] = 2**30
    """Larger messages are split into parts of this size (MPI counts are 32-bit)."""
    compression: Literal["none", "zlib", "lz4"] = "none"
    """Of what actors send to inference ranks, without loss: for networks slower than the codec."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StopConfig:
    """When training is complete; the first condition that holds. 0 or none: not used."""

    frames: NonNegative = 0
    """Emulator frames trained on (agent steps times frame skip); with a replay, stored."""
    agent_steps: NonNegative = 0
    """Agent steps trained on; with a replay, stored."""
    wall_time_s: NonNegativeFloat = 0.0
    """Seconds of training, over all restarts."""
    mean_return: float | None = None
    """Mean return of the last 100 episodes; of evaluation environments, if there are any."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """Rounds of whole episodes that evaluator ranks (`topology.evaluators`) play in training."""

    episodes: Positive = 10
    """Episodes of a round, all with the same weights; their mean is `eval/return`."""
    envs: NonNegative = 0
    """Environments that an evaluator steps; 0: one per episode, 8 at most."""
    greedy: bool = True
    """Take the best action instead of a sample."""
    every_s: NonNegativeFloat = 30.0
    """Shortest time from the beginning of a round to that of the next one."""
    max_episode_steps: Positive = 27_000
    """Agent steps after which an episode is cut off and counts with its return so far, as a
    greedy policy can go in circles for ever. Holds for `hpcrl eval`, too."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Durable snapshots of the learners."""

    every_s: NonNegativeFloat = 300.0
    """Seconds between checkpoints; 0: only at the end and at a stop."""
    keep: Positive = 3
    """Newest checkpoints kept."""
    on_error: Literal["continue", "pause"] = "continue"
    """When a periodic checkpoint can't be written: train on and try again (continue), or train no
    further before it is written (pause). The one at a stop must be written, or the job ends with
    74; the last good checkpoint is kept in any case."""
    pause_s: NonNegativeFloat = 300.0
    """Longest pause, and longest time to try for the checkpoint at a stop; then the job ends with
    74. At most half of `transport.deadline_s` and `run.silence_timeout_s`, as others wait."""
    replay: Literal["none", "node_local", "shared"] = "none"
    """Whether each checkpoint also keeps the replay, written beside training: shared, in the
    run directory; node_local, in `$TMPDIR` of each node, for a job that comes back to the same
    nodes (and a `$TMPDIR` that outlives it). The disk holds up to two sets of shards. A run
    that goes on, with any number of learners, takes the newest whole set up to its checkpoint."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MetricsConfig:
    """Progress, metrics.jsonl and TensorBoard."""

    every_s: PositiveFloat = 5.0
    """Seconds between records."""
    tensorboard: bool = True
    """Also write TensorBoard event files."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecordingConfig:
    """Trajectories: whole episodes in HDF5 segments under `RUN/trajectories`."""

    enabled: bool = False
    """Record while training. It never waits: an episode that can't be kept is dropped whole,
    and counted in metrics.jsonl."""
    fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the episodes that is recorded; a hash of environment id and episode number
    says which."""
    max_bytes: NonNegative = 100_000_000_000
    """Bytes on disk of all recording ranks and restarts together; each start gives an equal
    share of what is left to each rank. Recording ends before it would be passed, training goes
    on. 0: no bound."""
    fields: tuple[Literal["observation", "policy_version", "behaviour"], ...] = (
        "observation",
        "policy_version",
        "behaviour",
    )
    """What is kept of each step beside action, reward and end; behaviour is what the agent
    notes of its choice, such as log-probability and value."""
    compression: Literal["gzip-1", "gzip-4", "gzip-9", "lzf", "none"] = "gzip-1"
    """Filter of frames and other wide columns. lzf needs h5py at the reader."""
    segment_bytes: Positive = 2**29
    """An episode that ends when its segment has this size begins the next one."""
    segment_s: PositiveFloat = 600.0
    """An episode that ends this long after its segment was begun begins the next one."""
    buffer_bytes: Positive = 2**29
    """Memory of a recording rank for running episodes and those that wait to be written."""
