"""Small configurations, environments and networks for tests of the data path."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from env_wrappers import make
from hpcrl.brain import Brain
from hpcrl.comm.slots import Rows
from hpcrl.config.load import parse_config
from hpcrl.config.root import Config
from hpcrl.specs import EnvSpec

BASE: dict[str, Any] = {
    "env": {"name": "synthetic:counting", "envs_per_actor": 2, "groups": 1},
    "topology": {"learners": 1, "inference": 1, "actors": 1},
    "network": {"hidden_sizes": [8]},
    "learner": {"batch_unrolls": 2, "unroll_steps": 3, "backend": "mpi"},
    "stop": {"agent_steps": 100},
    "metrics": {"every_s": 0.2, "tensorboard": False},
    "checkpoint": {"every_s": 0},
    "transport": {"deadline_s": 60.0, "start_deadline_s": 60.0},
}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, one section deep."""
    return {
        section: {**base.get(section, {}), **over.get(section, {})}
        if isinstance(over.get(section, base.get(section)), Mapping)
        else over.get(section, base.get(section))
        for section in base.keys() | over.keys()
    }


def config_of(**sections: Any) -> Config:
    """A configuration that trains in seconds; sections overlay `BASE`."""
    return parse_config(merged(BASE, sections))


def env_spec(name: str = "synthetic:counting", **options: Any) -> EnvSpec:
    """The spec of an environment, over JSON as ranks exchange it."""
    return EnvSpec.from_json(make(name, 1, [0], options).spec)


def brain_of(env: EnvSpec, **sections: Any) -> Brain:
    """The agent for `env`."""
    return Brain(config_of(**sections), env)


def rows_of(batch: Any, ids: Any, run_id: Any = 0) -> Rows:
    """What a policy sees of the rows `ids` of an EnvBatch's StepBatch."""
    ids = np.asarray(ids, np.intp)
    final = batch.final_observation
    truncated = batch.truncated[ids]
    return Rows(
        ids=ids,
        run_id=np.broadcast_to(np.asarray(run_id, np.int64), len(ids)).copy(),
        observation={path: leaf[ids].copy() for path, leaf in batch.observation.items()},
        reward=batch.reward[ids].copy(),
        terminated=batch.terminated[ids].copy(),
        truncated=truncated.copy(),
        final_observation={path: leaf[ids].copy() for path, leaf in final.items()}
        if truncated.any()
        else None,
    )
