"""The whole configuration and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from hpcrl.agents.vtrace.config import VTraceConfig
from hpcrl.config.sections import (
    CheckpointConfig,
    EnvConfig,
    InferenceConfig,
    LearnerConfig,
    MetricsConfig,
    NetworkConfig,
    RunConfig,
    StopConfig,
    TransportConfig,
)
from hpcrl.config.types import STRICT
from hpcrl.topology import TopologyConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """One training job."""

    layout: Literal["seed"] = "seed"
    """How roles are laid out: seed is central batched inference."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run as a whole."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    """How many ranks take each role."""
    agent: VTraceConfig = field(default_factory=VTraceConfig)
    """The algorithm and its parameters."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The network."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Learner ranks."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """Inference ranks."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Messages between ranks."""
    stop: StopConfig = field(default_factory=StopConfig)
    """When training is complete."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Durable snapshots."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What is written about progress."""


CONFIG_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)
