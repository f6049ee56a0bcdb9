"""Atari games by name, on ALE's own vector environment (C++ emulation and preprocessing).

As found with ale-py 0.12: the emulator's `episodic_life` restarts the whole game at each lost
life, so lives are watched here instead. Its frame cap is reported as truncation, but the final
frame is a mixture with the observation before (up to 4 % of the pixels), so the cap is kept
here, too. A category that doesn't exist blocks the emulator for ever, so actions are checked
first. A ROM without a single-player mode ends the process, so those are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from env_wrappers.actions import ActionCodec
from env_wrappers.batch import EnvBatch, EpisodeTotals, StepBatch, env_spec, reset_batch
from env_wrappers.errors import EnvError, suggestion
from env_wrappers.observations import ObservationCodec
from env_wrappers.options import check_range, resolve_options

# repeat_action_probability: the chance that the emulator repeats the action before ("sticky").
# life_loss: a lost life terminates the episode for learning; the game goes on, and the
#   reported return is that of the whole game.
# noop_max: up to this many no-ops, less one, come before the first observation.
# max_frames: emulator frames after which an episode is truncated, no-ops before it not counted.
# frame_stack: time steps that the network sees; frames still travel singly.
# num_threads: emulator threads of this batch.
DEFAULTS: dict[str, Any] = {
    "repeat_action_probability": 0.25,
    "full_action_space": False,
    "life_loss": False,
    "noop_max": 30,
    "frame_skip": 4,
    "max_frames": 108_000,
    "use_fire_reset": True,
    "frame_stack": 4,
    "grayscale": True,
    "image_height": 84,
    "image_width": 84,
    "num_threads": 1,
}

_NO_CAP_FRAMES = 2**30
_MULTIPLAYER_ONLY = {"combat", "joust", "maze_craze", "warlords"}


class AtariBatch(EnvBatch):
    """E emulators of one game; observation leaf "obs" `<uint8>[E, H, W]` (`[E, H, W, 3]`)."""

    def __init__(
        self, name: str, rom: str, seeds: Sequence[int], options: Mapping[str, Any]
    ) -> None:
        """Start the emulators.

        Args:
          name: full name for the spec.
          rom: ROM name, such as "ms_pacman".
          seeds: one for each environment; those of 2^31 and more are hashed to 31 bits.
          options: all of `DEFAULTS`, checked.
        """
        from ale_py.vector_env import AtariVectorEnv

        self.num_envs = len(seeds)
        self._envs = AtariVectorEnv(
            rom,
            self.num_envs,
            num_threads=options["num_threads"],
            max_num_frames_per_episode=_NO_CAP_FRAMES,
            repeat_action_probability=options["repeat_action_probability"],
            full_action_space=options["full_action_space"],
            autoreset_mode=AutoresetMode.SAME_STEP,
            img_height=options["image_height"],
            img_width=options["image_width"],
            grayscale=options["grayscale"],
            stack_num=1,
            frameskip=options["frame_skip"],
            noop_max=options["noop_max"],
            reward_clipping=False,
            use_fire_reset=options["use_fire_reset"],
        )
        self._seeds: NDArray[np.int64] | None = np.array([_seed31(s) for s in seeds], np.int64)
        self._max_steps = -(-options["max_frames"] // options["frame_skip"])
        self._life_loss = bool(options["life_loss"])
        self._lives = np.zeros(self.num_envs, np.int32)
        self._actions = ActionCodec(self._envs.single_action_space, self.num_envs)
        colours = () if options["grayscale"] else (3,)
        shape = (options["image_height"], options["image_width"], *colours)
        observation = ObservationCodec(Box(0, 255, shape, np.uint8)).spec(options["frame_stack"])
        self.spec = env_spec(name, observation, self._actions.spec(), options["frame_skip"])
        self._totals = EpisodeTotals(self.num_envs)

    def reset(self) -> StepBatch:
        """Start a game everywhere; only the first call uses the seeds."""
        frames, info = self._envs.reset(seed=self._seeds)
        self._seeds = None
        self._lives = info["lives"]
        self._totals.clear()
        return reset_batch({"obs": frames[:, 0]}, self.num_envs)

    def step(self, actions: NDArray[Any]) -> StepBatch:
        """Take one agent step everywhere; see `EnvBatch.step`."""
        frames, scores, game_over, _, info = self._envs.step(self._actions.decode(actions))
        reward = scores.astype(np.float32)
        terminated = game_over
        if self._life_loss:
            # Where the game is over, these are the lives of the next one already.
            lives = info["lives"]
            terminated = game_over | ((lives < self._lives) & (lives > 0))
        capped = ~game_over & (self._totals.steps + 1 >= self._max_steps)
        truncated = capped & ~terminated
        final = {"obs": frames[:, 0]} if truncated.any() else None
        if capped.any():
            frames, info = self._envs.reset(options={"reset_mask": capped})
        self._lives = info["lives"]
        ended = game_over | capped
        episode_return, episode_steps = self._totals.add(reward, ended)
        return StepBatch(
            observation={"obs": frames[:, 0]},
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(self.num_envs, np.bool_),
            restarted=np.zeros(self.num_envs, np.bool_),
            final_observation=final,
            ended=ended,
            episode_return=episode_return,
            episode_steps=episode_steps,
        )

    def close(self) -> None:
        """Stop the emulator threads, which end with the object that holds them."""
        vars(self).pop("_envs", None)


def make(
    name: str, target: str, num_envs: int, seeds: Sequence[int], options: Mapping[str, Any]
) -> EnvBatch:
    """Make the game `target`, such as "Breakout" or "ms_pacman"; options as in `DEFAULTS`.

    Raises:
      EnvError: no such game, or an option that cannot work.
    """
    from ale_py import roms

    games = {_plain(rom): rom for rom in roms.get_all_rom_ids() if rom not in _MULTIPLAYER_ONLY}
    rom = games.get(_plain(target))
    if rom is None:
        titles = [known.title().replace("_", "") for known in games.values()]
        hint = suggestion(target, titles) or f"; games: {', '.join(sorted(titles))}"
        raise EnvError(f"there is no Atari game {target!r}{hint}")
    resolved = resolve_options(name, options, DEFAULTS)
    check_range(name, resolved, "repeat_action_probability", 0.0, 1.0)
    check_range(name, resolved, "noop_max", 0)
    for key in ("frame_skip", "frame_stack", "image_height", "image_width", "num_threads"):
        check_range(name, resolved, key, 1)
    check_range(name, resolved, "max_frames", resolved["frame_skip"])
    return AtariBatch(name, rom, seeds, resolved)


def _plain(name: str) -> str:
    """`name` without what differs between "MsPacman", "ms_pacman" and "Ms-Pacman"."""
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def _seed31(seed: int) -> int:
    """The emulator's seed, below 2^31: `seed` itself where it fits."""
    if seed < 2**31:
        return seed
    return int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
