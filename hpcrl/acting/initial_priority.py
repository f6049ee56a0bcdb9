"""Initial priorities of replay items, computed where an unroll is completed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hpcrl.brain import Brain
from hpcrl.comm.wire import Layout

_ROWS = ("reward", "terminated", "final")


class InitialPriorities:
    """Fills the `priority` of complete unrolls from what acting recorded in their rows.

    An item may begin in the unroll before, so the last rows of each environment are kept. Of
    one that would begin before its run did the priority has no meaning, and the shard, which
    lacks its rows, never samples it.

    Args:
      brain: the agent.
      layout: the unroll message.
      num_envs: N.
    """

    def __init__(self, brain: Brain, layout: Layout, num_envs: int):
        window = brain.window
        assert window is not None
        self._brain = brain
        self._layout = layout
        unroll_steps = layout.fields["reward"].shape[0] - 1
        self._history_steps = window.loss_steps - unroll_steps // window.items_per_unroll
        names = [*_ROWS, *(f"behaviour:{name}" for name in brain.behaviour)]
        self._history = {
            name: np.zeros((num_envs, self._history_steps), layout.fields[name].dtype)
            for name in names
        }

    def fill(self, ids: npt.NDArray[np.intp], unrolls: npt.NDArray[np.uint8]) -> None:
        """Write the priorities into `unrolls` `<uint8>[n, nbytes]` of the environments `ids`."""
        views = self._layout.views(unrolls)
        rows = {}
        for name, history in self._history.items():
            extended = np.concatenate([history[ids], views[name]], 1)
            rows[name.removeprefix("behaviour:")] = torch.from_numpy(extended.T)
            if self._history_steps:
                history[ids] = extended[:, -1 - self._history_steps : -1]
        views["priority"][...] = self._brain.initial_priorities(rows).numpy()
