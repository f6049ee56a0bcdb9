"""What an evaluation found, its figures, and how they are printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hpcrl.evaluation.atari_scores import human_normalised
from hpcrl.evaluation.whole_episodes import Episode
from hpcrl.human import format_count
from hpcrl.run.report import key_value_table

_LISTED_EPISODES = 20
"""Up to this many episodes are printed one by one."""


@dataclass(frozen=True)
class Evaluation:
    """What evaluation found.

    Attributes:
      env_name: full name of the environment.
      checkpoint: its directory.
      learner_steps: of the checkpoint.
      frames: emulator frames that it was trained on.
      greedy: whether actions were the likeliest ones.
      episodes: by environment, in the order in which each played them.
      messages: what the reader should know: files passed over, options changed.
      folder: where episodes, table and videos were written, if they were.
      losses: what was to be written there and is not, and why.
    """

    env_name: str
    checkpoint: Path
    learner_steps: int
    frames: int
    greedy: bool
    episodes: tuple[Episode, ...]
    messages: tuple[str, ...]
    folder: Path | None = None
    losses: tuple[str, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return the figures over all episodes; `human_normalised` is None where not known."""
        returns = np.array([episode.episode_return for episode in self.episodes])
        low, middle, high = np.percentile(returns, [25, 50, 75])
        return {
            "env_name": self.env_name,
            "checkpoint": str(self.checkpoint),
            "learner_steps": self.learner_steps,
            "frames": self.frames,
            "greedy": self.greedy,
            "episodes": len(returns),
            "mean_return": float(returns.mean()),
            "q25_return": float(low),
            "median_return": float(middle),
            "q75_return": float(high),
            "min_return": float(returns.min()),
            "max_return": float(returns.max()),
            "mean_agent_steps": float(np.mean([e.agent_steps for e in self.episodes])),
            "cut_off_episodes": sum(e.cut_off for e in self.episodes),
            "human_normalised": human_normalised(self.env_name, float(returns.mean())),
        }


def print_evaluation(result: Evaluation, console: Console | None = None) -> None:
    """Print a table of the returns; few episodes are listed one by one."""
    console = console or Console()
    returns = [episode.episode_return for episode in result.episodes]
    summary = result.summary()
    rows = {
        "environment": result.env_name,
        "checkpoint": f"{result.checkpoint} ({format_count(result.frames)} frames)",
        "actions": "greedy" if result.greedy else "sampled",
        "episodes": str(len(returns)),
        "mean return": f"{summary['mean_return']:.4g}",
        "median return": f"{summary['median_return']:.4g}",
        "middle half": f"{summary['q25_return']:.4g} to {summary['q75_return']:.4g}",
        "lowest to highest": f"{summary['min_return']:.4g} to {summary['max_return']:.4g}",
        "mean agent steps": f"{summary['mean_agent_steps']:.4g}",
    }
    if summary["human_normalised"] is not None:
        rows["human-normalised"] = f"{100 * summary['human_normalised']:.4g} %"
    if result.folder:
        rows["written to"] = str(result.folder)
    if len(returns) <= _LISTED_EPISODES:
        rows["returns"] = ", ".join(f"{score:.4g}" for score in returns)
    for message in result.messages:
        console.print(f"note: {message}", markup=False, highlight=False)
    console.print(key_value_table("evaluation", rows))
    for loss in result.losses:
        console.print(f"lost: {loss}", markup=False, highlight=False)
