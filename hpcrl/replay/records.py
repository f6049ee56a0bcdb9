"""What goes into a replay shard, what comes out, and what is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Int64 = NDArray[np.int64]


class ReplayUnroll(NamedTuple):
    """One unroll of one environment, as it enters (and leaves) a shard.

    Attributes:
      stream_id: the environment.
      run_id: changes whenever the environment was restarted.
      unroll_index: 0 for the first unroll of a run, then counting up by one.
      rows: leaves `[T+1, ...]`; row T is the next unroll's row 0. No burn-in prefix.
      items: leaves `[I, ...]`, such as the recurrent state before the item's first row (its
        first burn-in row or, in a run's first unroll, its first row that exists).
      priorities: `<float64>[I]`.
      eligible: `<bool>[I]`, false for an item that must never be sampled (such as an n-step
        transition from a `final` row).
    """

    stream_id: int
    run_id: int
    unroll_index: int
    rows: Mapping[str, Array]
    items: Mapping[str, Array]
    priorities: Array
    eligible: Array | None = None


class SampleBuffers(NamedTuple):
    """Output arrays of `ReplayShard.sample`, to be used again and again.

    Attributes:
      rows: leaves `[prefix + window, B, ...]`, time first; `ReplayLayout.prefix` says how many
        rows before the window each leaf has.
      items: leaves `[B, ...]`.
    """

    rows: dict[str, Array]
    items: dict[str, Array]


class ReplaySample(NamedTuple):
    """B sampled sequences. The arrays are views of the buffers that were passed, if any.

    Attributes:
      rows: leaves `[window, B, ...]`: burn-in, loss rows, bootstrap row.
      prefixes: for stacked leaves, the frames before row 0, `[K-1, B, ...]`, zero where they
        are not of the episode of the row before row 0; as `ops.frame_stack` wants them.
      valid: `<bool>[window, B]`, false for rows before the first row of a run; those are all
        zeros, and the recurrent state has to pass them unchanged.
      items: leaves `[B, ...]`.
      slots, generations: `<int64>[B]`, to pass back to `update_priorities`.
      probability: `<float64>[B]`, within this shard.
      age_unrolls: `<int64>[B]`, unrolls that this shard received since.
      priority_age_draws: `<int64>[B]`, calls of `sample` since the priority was written, with
        this one.
    """

    rows: dict[str, Array]
    prefixes: dict[str, Array]
    valid: NDArray[np.bool_]
    items: dict[str, Array]
    slots: Int64
    generations: Int64
    probability: NDArray[np.float64]
    age_unrolls: Int64
    priority_age_draws: Int64


@dataclass(frozen=True)
class ReplayCounters:
    """What happened to a shard since it was made.

    Attributes:
      inserted_unrolls: unrolls received.
      evicted_unrolls: unrolls given up for newer ones.
      incomplete_items: items that were never sampled because rows of theirs were missing
        when they came (a gap, or not eligible).
      gaps: unrolls that came without their predecessor.
      reclaimed_rows: items given up because too many runs ended at once.
      sampled_items: items drawn.
      stale_updates: priorities ignored because their item was evicted before they came.
    """

    inserted_unrolls: int
    evicted_unrolls: int
    incomplete_items: int
    gaps: int
    reclaimed_rows: int
    sampled_items: int
    stale_updates: int
