"""The whole configuration and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, TypeAdapter
from pydantic.dataclasses import dataclass

from hpcrl.agents.a3c.config import A3CConfig
from hpcrl.agents.apex.config import ApexConfig
from hpcrl.agents.ppo.config import PPOConfig
from hpcrl.agents.r2d2.config import R2D2Config
from hpcrl.agents.vtrace.config import VTraceConfig
from hpcrl.config.sections import (
    CheckpointConfig,
    EnvConfig,
    EvaluationConfig,
    InferenceConfig,
    LearnerConfig,
    MetricsConfig,
    NetworkConfig,
    RecordingConfig,
    ReplayConfig,
    RunConfig,
    StopConfig,
    TransportConfig,
)
from hpcrl.config.types import STRICT
from hpcrl.topology import TopologyConfig


def _agent_name(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("name", "vtrace")
    return getattr(value, "name", None)


AgentConfig = Annotated[
    Annotated[VTraceConfig, Tag("vtrace")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[A3CConfig, Tag("a3c")]
    | Annotated[R2D2Config, Tag("r2d2")]
    | Annotated[ApexConfig, Tag("apex")],
    Discriminator(_agent_name),
]
"""One of the agents' parameters, by `name`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """One training job."""

    layout: Literal["seed", "impala", "sync", "async_gradient", "replay"] = "seed"
    """How acting and learning are laid out: seed (central batched inference, V-trace), impala
    (workers act with their own copy of the weights, V-trace), sync (acting waits for the weights
    of each learner step, PPO), async_gradient (workers act and compute gradients, the learners
    hold shards of the parameters and apply each gradient as it comes, A3C), or replay (a
    prioritized replay in the learners' memory, R2D2 and Ape-X)."""
    placement: Literal["auto", "central", "local"] = "auto"
    """Where actions are chosen: on inference ranks (central) or by the workers that step the
    environments (local); auto: as is usual for the layout."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run as a whole."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    """How many ranks take each role."""
    agent: AgentConfig = field(default_factory=VTraceConfig)
    """The algorithm and its parameters."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The network."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Learner ranks."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """The replay, for agents that learn from one."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """Inference ranks."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Messages between ranks."""
    stop: StopConfig = field(default_factory=StopConfig)
    """When training is complete."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What evaluator ranks play during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Durable snapshots."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What is written about progress."""
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    """What is kept of the episodes."""


CONFIG_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)
