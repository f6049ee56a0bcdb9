"""What a replay shard stores per row and per item, and which rows one sampled item needs.

Rows of one environment come in unrolls of T = `unroll_length` rows plus one bootstrap row,
which is the first row of the next unroll. A shard stores the first T rows of every unroll
as one *block*, so that each row is stored once. Positions are relative to a block: its own
rows are 0..T-1, position T is the first row of its successor, negative positions lie in its
predecessors.

Item m (of `items_per_unroll`, I) of a block has the bootstrap position (m + 1) T / I, before
it `sequence_length` (L) loss rows, before them `burn_in` rows, and before them the frames
that only the stacks of the first of these rows show:

    stack prefix (K-1) | burn-in | L loss rows | 1 bootstrap row

R2D2 uses I = 1, L = T: every row is a loss row of one item. Ape-X uses I = T, L = n: an
item per step with its n-step transition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.specs import ArraySpec

START = "start"
"""Path of the row leaf that says where an episode starts; needed to rebuild stacks."""


@dataclass(frozen=True)
class ReplayLayout:
    """Leaves and geometry of a replay shard.

    Attributes:
      rows: leaves of one row by path: single frames, scalars, what the acting side recorded.
      items: leaves of one item by path, such as the recurrent state before its first row.
      unroll_length: T, rows per unroll without the bootstrap row.
      burn_in: rows before the loss rows, replayed without gradient; below `unroll_length`.
      sequence_length: L, loss rows per item; 0 means `unroll_length`.
      items_per_unroll: I, divides `unroll_length`.
      stacks: for row leaves that the network sees stacked, the stack's depth K by path.

    Raises:
      ValueError: the geometry is impossible.
    """

    rows: Mapping[str, ArraySpec]
    items: Mapping[str, ArraySpec]
    unroll_length: int
    burn_in: int = 0
    sequence_length: int = 0
    items_per_unroll: int = 1
    stacks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sequence_length == 0:
            object.__setattr__(self, "sequence_length", self.unroll_length)
        self._check_geometry()
        self._check_stacks()

    def _check_geometry(self) -> None:
        if self.unroll_length < 1:
            raise ValueError(f"unroll_length {self.unroll_length} must be at least 1")
        if not 0 <= self.burn_in < self.unroll_length:
            raise ValueError(
                f"burn_in {self.burn_in} must be in [0, unroll_length={self.unroll_length}): "
                "the recurrent state is recorded once per unroll"
            )
        if self.items_per_unroll < 1 or self.unroll_length % self.items_per_unroll:
            raise ValueError(
                f"items_per_unroll {self.items_per_unroll} must divide "
                f"unroll_length {self.unroll_length}"
            )
        if self.sequence_length < self.period:
            raise ValueError(
                f"sequence_length {self.sequence_length} is below the {self.period} rows between "
                "items: some rows would never be trained on"
            )

    def _check_stacks(self) -> None:
        for path, stack in self.stacks.items():
            if path not in self.rows:
                raise ValueError(f"stacked leaf {path!r} is not among the rows {list(self.rows)}")
            if stack < 1:
                raise ValueError(f"stack {stack} of {path!r} must be at least 1")
        if self.stack_prefix and self.rows.get(START) != ArraySpec((), "bool"):
            raise ValueError(f"stacked leaves need a row leaf {START!r} of one bool")

    @property
    def period(self) -> int:
        """Rows between the items of one unroll."""
        return self.unroll_length // self.items_per_unroll

    @property
    def window(self) -> int:
        """Rows of one item: burn-in, loss rows, bootstrap row."""
        return self.burn_in + self.sequence_length + 1

    @property
    def stack_prefix(self) -> int:
        """Rows before the window that the deepest stack shows."""
        return max((stack - 1 for stack in self.stacks.values()), default=0)

    def prefix(self, path: str) -> int:
        """Rows before the window that are sampled of this row leaf."""
        if path == START:
            return self.stack_prefix
        return self.stacks.get(path, 1) - 1

    @property
    def loss_start(self) -> NDArray[np.int64]:
        """Position of each item's first loss row, `<int64>[I]`."""
        ends = (np.arange(self.items_per_unroll, dtype=np.int64) + 1) * self.period
        return ends - self.sequence_length

    @property
    def first_position(self) -> NDArray[np.int64]:
        """Position of the first row that each item needs, `<int64>[I]`."""
        return self.loss_start - self.burn_in - self.stack_prefix

    @property
    def num_predecessors(self) -> int:
        """Blocks before its own that an item may need."""
        return int(max(0, -(self.first_position[0] // self.unroll_length)))

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored agent step."""
        return sum(spec.nbytes for spec in self.rows.values())

    @property
    def item_bytes(self) -> int:
        """Bytes of one item's own leaves."""
        return sum(spec.nbytes for spec in self.items.values())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict; the inverse of `from_json`."""
        return {
            "rows": {path: [list(spec.shape), spec.dtype] for path, spec in self.rows.items()},
            "items": {path: [list(spec.shape), spec.dtype] for path, spec in self.items.items()},
            "unroll_length": self.unroll_length,
            "burn_in": self.burn_in,
            "sequence_length": self.sequence_length,
            "items_per_unroll": self.items_per_unroll,
            "stacks": dict(self.stacks),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ReplayLayout:
        """Build the layout from the dict that `to_json` gives."""
        return ReplayLayout(
            rows={path: ArraySpec(tuple(s), dtype) for path, (s, dtype) in data["rows"].items()},
            items={path: ArraySpec(tuple(s), dtype) for path, (s, dtype) in data["items"].items()},
            unroll_length=int(data["unroll_length"]),
            burn_in=int(data["burn_in"]),
            sequence_length=int(data["sequence_length"]),
            items_per_unroll=int(data["items_per_unroll"]),
            stacks={path: int(stack) for path, stack in data["stacks"].items()},
        )
