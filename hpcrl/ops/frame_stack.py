"""Rebuild stacks of frames at the receiver; each frame travels and is stored once.

The stack at row t holds the frames of rows t-K+1 .. t, newest last. Frames from before the
first row of row t's episode are zero. A `start` anywhere inside the window hides everything
older, so the mask accumulates over the window: an episode that lasted one step hides the
episode before it, too. Final rows of truncated episodes are ordinary frames of their episode.

Two implementations, equal by test: whole unrolls for a learner, and step by step for acting.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcrl.checks import check_shape
from hpcrl.types import Array


def stack_frames(frames: Array, prefix: Array, start: Array) -> Array:
    """Return the stack at every row of a batch of unrolls.

    Works on numpy arrays and on torch tensors, on whatever device; in host memory numpy is
    many times faster.

    Args:
      frames: `[T+1, B, *]`, one frame per row.
      prefix: `[K-1, B, *]`, the frames before row 0, oldest first, zero where they are not
        of the episode of the row before row 0: all but the oldest of that row's stack.
      start: `<bool>[T+1, B]`, the row is the first of an episode.

    Returns:
      `[T+1, B, K, *]`, dtype of `frames`.

    Raises:
      ValueError: shapes do not fit.
    """
    num_rows, batch_size, *frame_shape = frames.shape
    stack = len(prefix) + 1
    check_shape("prefix", prefix, stack - 1, batch_size, *frame_shape)
    check_shape("start", start, num_rows, batch_size)

    shape = (num_rows, batch_size, stack, *frame_shape)
    is_numpy = isinstance(frames, np.ndarray)
    stacks = np.empty(shape, frames.dtype) if is_numpy else frames.new_empty(shape)
    stacks[:, :, -1] = frames
    hidden = start & False  # grows with age: frame of row t - age hidden from row t
    for age in range(1, stack):
        slot = stack - 1 - age
        recent = min(age, num_rows)  # rows whose frame of this age lies in the prefix
        stacks[:recent, :, slot] = prefix[slot : slot + recent]
        stacks[recent:, :, slot] = frames[: num_rows - recent]
        hidden[age - 1 :] |= start[: max(num_rows - age + 1, 0)]
        stacks[:, :, slot][hidden] = 0
    return stacks


class FrameStacker:
    """The same stacks one step at a time, for many environments.

    Row i is the environment in slot i; rows advance independently of each other.
    """

    def __init__(
        self, num_rows: int, stack: int, frame_shape: tuple[int, ...], dtype: DTypeLike
    ) -> None:
        """Make a stacker whose rows have seen nothing: all older frames are zero.

        Args:
          num_rows: environments.
          stack: K, frames per stack, at least 1.
          frame_shape: shape of one frame.
          dtype: dtype of the frames.

        Raises:
          ValueError: `stack` is below 1.
        """
        if stack < 1:
            raise ValueError(f"stack is {stack}; a stack needs at least 1 frame")
        # A ring of K frames per row; the stack after a frame begins one behind it.
        self._ring = np.zeros((num_rows, stack, *frame_shape), dtype)
        self._newest = np.zeros(num_rows, np.intp)
        self._ages = np.arange(1, stack + 1)

    def push(self, rows: NDArray[np.integer], frames: Array, start: Array) -> Array:
        """Append one frame to each of `rows` and return their stacks.

        Args:
          rows: `<int>[n]`, without duplicates.
          frames: `[n, *]`, the newest frames.
          start: `<bool>[n]`, the frame is the first of an episode.

        Returns:
          `[n, K, *]`, a new array.

        Raises:
          ValueError: shapes do not fit.
        """
        _, stack, *frame_shape = self._ring.shape
        check_shape("frames", frames, len(rows), *frame_shape)
        check_shape("start", start, len(rows))
        newest = self._newest[rows] = (self._newest[rows] + 1) % stack
        self._ring[rows[start]] = 0
        self._ring[rows, newest] = frames
        return self._ring[rows[:, None], (newest[:, None] + self._ages) % stack]

    def rewind(self, rows: NDArray[np.integer], prefix: Array) -> None:
        """Return to the frames before a push, which must follow again.

        Args:
          rows: `<int>[n]`.
          prefix: `[n, K-1, *]`, all but the newest frame of the stacks that the push gave.
        """
        stack = self._ring.shape[1]
        newest = self._newest[rows]
        self._ring[rows[:, None], (newest[:, None] + self._ages[1:]) % stack] = prefix
