"""A checkpoint that the root learner alone has read, on every learner."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from hpcrl.comm.link import Group
from hpcrl.run.checkpoint import Checkpoint

Tensors = dict[str, npt.NDArray[np.generic]]


def share_checkpoint(
    group: Group, is_root: bool, checkpoint: Checkpoint | None, extra: dict[str, Any]
) -> tuple[dict[str, Any], Tensors] | None:
    """Collective over the learners: return the root's checkpoint; None: it has none.

    Args:
      group: of the learners; its first member is the root.
      is_root: whether this is the root.
      checkpoint: that of the root; None elsewhere.
      extra: what the root adds to the state.

    Returns:
      State and tensors by name.
    """
    tensors, state = b"", b""
    if checkpoint is not None:
        tensors = safetensors.numpy.save(checkpoint.tensors)
        state = json.dumps({**checkpoint.state, **extra}).encode()
    state = group.broadcast(state if is_root else None, 0)
    tensors = group.broadcast(tensors if is_root else None, 0)
    return (json.loads(state), safetensors.numpy.load(tensors)) if state else None
