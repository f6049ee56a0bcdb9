"""EnvPool's environments: Weng et al. 2022, arXiv:2206.10558; stepped in C++, many at once.

As found with envpool 1.2: seeds count when a pool is made and never afterwards; bad task names
are an AssertionError; the threads of a pool end when the object is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from env_wrappers.batch import EnvBatch
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.options import check_range, resolve_options
from env_wrappers.single import COMMON, refuse_unknown
from env_wrappers.vector import VectorBatch

# max_episode_steps: agent steps after which an episode is truncated; 0: as the task has it.
# num_threads: stepping threads of this batch.
# kwargs: further settings of the task's own, such as {episodic_life: true}.
DEFAULTS: dict[str, Any] = {**COMMON, "num_threads": 1, "kwargs": {}}

# For Atari, what the family `atari` has by default, so that either may be taken.
_ATARI = {
    "stack_num": 1,
    "frame_skip": 4,
    "noop_max": 30,
    "repeat_action_probability": 0.25,
    "use_fire_reset": True,
    "episodic_life": False,
    "reward_clip": False,
    "max_episode_steps": 27_000,
}
_OURS = {"num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_episode_steps"}


class PoolBatch(VectorBatch):
    """One pool."""

    def close(self) -> None:
        """End its threads."""
        super().close()
        vars(self).pop("_envs")


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the task `target`, such as "Pong-v5" or "Ant-v4"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such task, or an option that cannot work.
    """
    import envpool

    resolved = resolve_options(name, options, DEFAULTS)
    check_range(name, resolved, "max_episode_steps", 0)
    check_range(name, resolved, "frame_stack", 1)
    check_range(name, resolved, "num_threads", 1)
    tasks = envpool.list_all_envs()
    if target not in tasks:
        hint = suggestion(target, tasks)
        raise (
            refuse_unknown("EnvPool task", target, tasks)
            if hint
            else EnvError(
                f"there is no EnvPool task {target!r}, among {len(tasks)} of them: "
                "envpool.list_all_envs() lists all"
            )
        )
    settings = _settings(name, envpool.make_spec(target), resolved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the rounding of infinite bounds
        envs = envpool.make(
            target,
            env_type="gymnasium",
            num_envs=num_envs,
            num_threads=resolved["num_threads"],
            seed=[seed % 2**31 for seed in seeds],
            **settings,
        )
    batch = PoolBatch(name, envs, None, frame_stack=resolved["frame_stack"])
    batch.spec["frame_skip"] = settings.get("frame_skip", 1)
    return batch


def _settings(name: str, spec: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The task's settings: those of ours for Atari, then the user's."""
    known = set(spec.config._fields)
    given = dict(options["kwargs"])
    for key in given:
        if key in _OURS or key not in known:
            hint = suggestion(key, sorted(known - _OURS))
            raise EnvError(f"{name} has no setting {key!r} among its kwargs{hint}")
    atari = "use_fire_reset" in known
    settings = {**(_ATARI if atari else {}), **given}
    if options["max_episode_steps"]:
        settings["max_episode_steps"] = options["max_episode_steps"]
    return settings
