"""`hpcrl eval`: plays whole episodes with a checkpoint of a run, without MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from env_wrappers import EnvBatch, EnvError, EnvFailure
from hpcrl.acting.env_batches import make_batch
from hpcrl.brain import Brain
from hpcrl.config.load import ConfigError, load_config, to_yaml
from hpcrl.config.root import Config
from hpcrl.durable import reason
from hpcrl.evaluation.files import new_folder, open_eval_recorder, write_results
from hpcrl.evaluation.result import Evaluation
from hpcrl.evaluation.whole_episodes import (
    Episode,
    EpisodePlayer,
    RecordingPolicy,
    episode_quota,
    evaluation_options,
)
from hpcrl.learning.optim import FlatParameters
from hpcrl.learning.trainer import load_model
from hpcrl.run.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    load_latest,
    load_path,
)
from hpcrl.run.run_dir import CHECKPOINTS, RunDir
from hpcrl.specs import EnvSpec


class EvaluationError(ValueError):
    """The run can't be evaluated as asked; the message says what is missing."""


def evaluate_run(
    run: Path,
    episodes: int,
    envs: int,
    greedy: bool,
    checkpoint: str | None,
    seed: int,
    record: bool = False,
    videos: int = 0,
    max_steps: int | None = None,
) -> Evaluation:
    """Play `episodes` whole episodes with the configuration of a run.

    Each environment plays a number of episodes that is fixed beforehand. Taking the first
    ones that end would favour short episodes.

    Args:
      run: the run directory.
      episodes: how many, at least 1.
      envs: most environments to play them in.
      greedy: take the likeliest action instead of a sample.
      checkpoint: a directory, the name of one of the run's, or its learner step; None takes the
        newest good one.
      seed: of the environments and of sampling; training never uses the same streams.
      record: write the episodes, a table and a summary to RUN/evaluations.
      videos: of how many of the best recorded episodes to write a video, if they hold images.
      max_steps: agent steps after which an episode is cut off; None: as the run's evaluators do.

    Returns:
      What was found. What can't be written after the first episode has begun is in `losses`.

    Raises:
      EvaluationError: no such run or checkpoint, a damaged one, one of another network, an
        environment that can't be made or misbehaves, videos without a recording, or a folder
        that can't be created.
    """
    if videos and not record:
        raise EvaluationError(
            f"{videos} videos need a recording of the episodes, and none is asked for: leave out "
            "--no-record or --videos"
        )
    try:
        config = load_config(RunDir(run).config)
        saved = _find_checkpoint(run, checkpoint)
        options, notes = evaluation_options(config.env)
        most = max_steps or config.evaluation.max_episode_steps
        quota = episode_quota(episodes, envs)
        seeds = [env_seed(seed, index) for index in range(len(quota))]
        folder = new_folder(run, saved.step) if record else None
        batch = make_batch(config.env, len(quota), seeds, options)
        try:
            policy = _load_policy(config, batch, saved, greedy, seed)
            player = EpisodePlayer(batch, policy, most)
            played, losses = _play_and_record(config, batch, policy, player, quota, seeds, folder)
        finally:
            batch.close()
    except (ConfigError, CheckpointError, EnvError, EnvFailure) as error:
        raise EvaluationError(str(error)) from error
    except OSError as error:
        raise EvaluationError(
            f"can't write in {run}/evaluations: {reason(error)}; --no-record plays without that"
        ) from error
    result = Evaluation(
        env_name=config.env.name,
        checkpoint=saved.path,
        learner_steps=saved.step,
        frames=int(saved.state["counters"]["frames"]),
        greedy=greedy,
        episodes=tuple(episode for of_env in played for episode in of_env),
        messages=(*saved.skipped, *notes, *_cut_off_note(played, most)),
        folder=folder,
        losses=tuple(losses),
    )
    return write_results(folder, to_yaml(config), result, videos) if folder else result


def _play_and_record(
    config: Config,
    envs: EnvBatch,
    policy: RecordingPolicy,
    player: EpisodePlayer,
    quota: Sequence[int],
    seeds: Sequence[int],
    folder: Path | None,
) -> tuple[list[list[Episode]], list[str]]:
    """Return the episodes of each environment, and what of them could not be recorded."""
    if folder is None:
        return _play_showing_progress(player, quota), []
    env = EnvSpec.from_json(envs.spec)
    recorder = open_eval_recorder(folder, config, env, Brain(config, env).behaviour, seeds)
    policy.recorder = recorder
    try:
        played = _play_showing_progress(player, quota)
    finally:
        recorder.close()
    if not recorder.dropped:
        return played, []
    whole = recorder.recorded + recorder.dropped
    return played, [
        f"{recorder.dropped} of {whole} episodes are not in the recording: {recorder.stopped}"
    ]


def _cut_off_note(played: Sequence[Sequence[Episode]], most: int) -> list[str]:
    cut_off = sum(episode.cut_off for of_env in played for episode in of_env)
    if not cut_off:
        return []
    return [
        f"{cut_off} of {sum(map(len, played))} episodes were cut off after {most:,} agent steps "
        "and count with their return so far: --max-steps changes that"
    ]


def env_seed(seed: int, index: int) -> int:
    """Return the 31-bit seed of environment `index`."""
    state = np.random.SeedSequence([seed, *b"evaluation", index]).generate_state(1)
    return int(state[0] >> 1)


def _find_checkpoint(run: Path, asked: str | None) -> Checkpoint:
    if asked is None:
        newest = load_latest(run)
        if newest is None:
            raise EvaluationError(f"{run} holds no checkpoint yet")
        return newest
    own = run / CHECKPOINTS
    for path in (Path(asked), own / asked, own / f"step-{asked:0>12}"):
        if path.is_dir():
            return load_path(path)
    known = ", ".join(str(step) for step, _ in list_checkpoints(run)) or "none"
    raise EvaluationError(
        f"there is no checkpoint {asked}, as a directory or in {own}; learner steps there: {known}"
    )


def _load_policy(
    config: Config, envs: EnvBatch, saved: Checkpoint, greedy: bool, seed: int
) -> RecordingPolicy:
    env = EnvSpec.from_json(envs.spec)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prefix = "model."
    tensors = {
        name.removeprefix(prefix): torch.from_numpy(array)
        for name, array in saved.tensors.items()
        if name.startswith(prefix)
    }
    try:
        brain = Brain(config, env)
        flat = FlatParameters(brain.make_network(seed=0))
        load_model(flat, tensors)
    except ValueError as error:
        raise EvaluationError(f"{saved.path}: {error}") from None
    policy = RecordingPolicy(
        brain, env, envs.num_envs, device, config.inference.precision, seed, greedy=greedy
    )
    policy.load(flat.value.numpy(), saved.step)
    return policy


def _play_showing_progress(player: EpisodePlayer, quota: Sequence[int]) -> list[list[Episode]]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("episodes", total=sum(quota))
        return player.play(quota, lambda: progress.advance(task)) or []
