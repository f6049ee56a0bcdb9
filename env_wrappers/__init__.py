"""Environments as one batch interface over gymnasium, ALE, user functions and a synthetic env.

    batch = make("atari:Breakout", num_envs=8, seeds=range(8), options={"life_loss": True})
    first = batch.reset()
    then = batch.step(actions)  # <int32|float32>[E, A]

The package imports neither hpcrl nor torch nor mpi4py, so that an actor stays small and the
environments can be used, and tested, alone.
"""

from env_wrappers.batch import FAILURE_KINDS, EnvBatch, StepBatch
from env_wrappers.errors import EnvError, EnvFailure
from env_wrappers.isolated import IsolatedBatch, Isolation
from env_wrappers.registry import describe, make, make_env, registered_families

__all__ = [
    "FAILURE_KINDS",
    "EnvBatch",
    "EnvError",
    "EnvFailure",
    "IsolatedBatch",
    "Isolation",
    "StepBatch",
    "describe",
    "make",
    "make_env",
    "registered_families",
]
