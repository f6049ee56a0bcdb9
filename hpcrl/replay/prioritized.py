"""Proportional prioritized sampling over a ring of slots, with identities that cannot alias.

Proportional prioritization is Prioritized Experience Replay, arXiv:1511.05952, §3.3:
P(i) = p_i**alpha / sum_k p_k**alpha.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcrl.replay.sum_tree import SumTree

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

MAX_PRIORITY = 1e50
"""Priorities above this are taken for a diverged learner and refused."""


_MAX_PRIORITY_BITS = np.float64(MAX_PRIORITY).view(np.uint64)

NOT_LIVE = -(1 << 62)
"""Generation of a slot that holds no item that can be drawn; nothing a caller pads with."""


class Draw(NamedTuple):
    """What `PrioritizedSampler.sample` gives, one entry per drawn item, all `[n]`.

    Attributes:
      slots: `<int64>`, where the items are.
      generations: `<int64>`, which item of that slot; pass both back with the new priority.
      probability: `<float64>`, p**alpha / mass of this sampler at the time of the draw.
    """

    slots: Int64
    generations: Int64
    probability: Float64


class PrioritizedSampler:
    """Priorities of the items in a ring of `capacity` slots, oldest overwritten first.

    The n-th item ever added has generation n and lives in slot n % capacity, so a pair
    (slot, generation) names one item for ever: a priority that arrives after its item was
    evicted is recognised, ignored and counted.

    An item is live from `add` until it is overwritten or removed. Priorities are floored at
    `min_priority`, so that every live item can be drawn; slots that are not live have mass 0
    and cannot.
    """

    def __init__(self, capacity: int, alpha: float, min_priority: float = 1e-6) -> None:
        """Make an empty sampler.

        Args:
          capacity: number of slots.
          alpha: priority exponent, 0 (uniform) to 1 (proportional) or above.
          min_priority: floor of every priority, above 0.
        """
        if not 0.0 <= alpha <= 2.0:
            raise ValueError(f"priority exponent {alpha} is outside [0, 2]")
        if not 1e-40 <= min_priority <= MAX_PRIORITY:
            raise ValueError(
                f"min_priority {min_priority} is outside [1e-40, {MAX_PRIORITY}]: an item "
                "whose priority becomes 0 would never be drawn again"
            )
        self.capacity = capacity
        self.alpha = alpha
        self.min_priority = min_priority
        self.num_added = 0
        self.num_draws = 0
        self.num_stale = 0
        self._size = 0
        self._tree = SumTree(capacity)
        self._priority = np.zeros(capacity)
        self._generation = np.full(capacity, NOT_LIVE, dtype=np.int64)
        self._written_at = np.zeros(capacity, dtype=np.int64)

    @staticmethod
    def bytes_for(capacity: int) -> int:
        """Bytes that a sampler of this capacity allocates."""
        return SumTree.bytes_for(capacity) + 3 * 8 * capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        arrays = (self._priority, self._generation, self._written_at)
        return self._tree.nbytes + sum(array.nbytes for array in arrays)

    @property
    def size(self) -> int:
        """Number of live items."""
        return self._size

    @property
    def mass(self) -> float:
        """Sum of p**alpha over the live items."""
        return self._tree.total()

    @property
    def max_priority(self) -> float:
        """Largest priority of a live item, 0 when there is none. Scans all slots."""
        return float(np.max(self._priority))

    @property
    def priority_sum(self) -> float:
        """Sum of the live items' priorities (without the exponent). Scans all slots."""
        return float(np.sum(self._priority))

    @property
    def min_probability(self) -> float:
        """Smallest probability of a live item, 0 when there is none. Scans all slots."""
        masses = self._tree.values
        live = masses > 0.0
        return float(masses[live].min() / self.mass) if live.any() else 0.0

    def start_at(self, generation: int) -> None:
        """Let the next item be number `generation`; only while no item was ever added."""
        if self.num_added:
            raise ValueError(f"{self.num_added} items were added already")
        self.num_added = generation

    def add(self, priorities: ArrayLike, eligible: ArrayLike | None = None) -> tuple[Int64, Int64]:
        """Add items, overwriting the oldest slots.

        Args:
          priorities: `<float64>[n]`, n at most the capacity.
          eligible: `<bool>[n]`; where false, a slot is used up but the item is never live.

        Returns:
          `(slots, generations)`, each `<int64>[n]`.

        Raises:
          ValueError: a priority is negative, not a number or above `MAX_PRIORITY`.
        """
        floored = self._floored(priorities)
        if len(floored) > self.capacity:
            raise ValueError(f"{len(floored)} items do not fit into {self.capacity} slots")
        generations = self.num_added + np.arange(len(floored))
        slots = generations % self.capacity
        live = np.ones(len(floored), bool) if eligible is None else np.asarray(eligible, bool)
        self._size += int(live.sum()) - int(self.is_live(slots).sum())
        self._generation[slots] = np.where(live, generations, NOT_LIVE)
        self._written_at[slots] = self.num_draws
        self._priority[slots] = np.where(live, floored, 0.0)
        self._tree.set(slots, np.where(live, floored**self.alpha, 0.0))
        self.num_added += len(floored)
        return slots, generations

    def remove(self, slots: ArrayLike) -> None:
        """Let the items in `slots` `<int64>[n]` (distinct) never be drawn again."""
        index = np.asarray(slots, dtype=np.int64)
        self._size -= int(self.is_live(index).sum())
        self._generation[index] = NOT_LIVE
        self._priority[index] = 0.0
        self._tree.set(index, np.zeros(len(index)))

    def update(self, slots: ArrayLike, generations: ArrayLike, priorities: ArrayLike) -> int:
        """Write new priorities of the items that are still there.

        Of duplicate items the last one wins.

        Args:
          slots: `<int64>[n]`.
          generations: `<int64>[n]`, as given by the draw.
          priorities: `<float64>[n]`.

        Returns:
          How many were stale (their item was evicted in the meantime) and ignored.

        Raises:
          ValueError: a priority is negative, not a number or above `MAX_PRIORITY`.
        """
        floored = self._floored(priorities)
        index = np.asarray(slots, dtype=np.int64)
        fresh = self._generation.take(index) == generations
        num_stale = len(index) - int(np.count_nonzero(fresh))
        if num_stale:
            index, floored = index[fresh], floored[fresh]
            self.num_stale += num_stale
        self._priority[index] = floored
        self._written_at[index] = self.num_draws
        self._tree.assign(index, floored**self.alpha)
        return num_stale

    def sample(
        self,
        n: int,
        rng: np.random.Generator,
        replacement: bool = True,
        stratified: bool = False,
    ) -> Draw:
        """Draw `n` items in proportion to p**alpha.

        Args:
          n: number of items.
          rng: source of randomness.
          replacement: whether an item may come up more than once; the draw is then sorted by
            slot. Without replacement, items are drawn one after the other from those not drawn
            yet; `probability` is then that of the first draw, which is exact for n much
            smaller than the size only.
          stratified: with replacement only: one draw from each of n equal parts of the mass;
            each item's expected number of draws stays n times its probability, with less
            variance (arXiv:1511.05952, appendix B.2.1).

        Returns:
          The draw; `probability` refers to this sampler alone.

        Raises:
          ValueError: fewer live items than are needed, or stratified without replacement.
        """
        if self._size < (1 if replacement else n):
            raise ValueError(f"cannot draw {n} items from {self._size} (replacement={replacement})")
        if stratified and not replacement:
            raise ValueError("a stratified draw without replacement is not defined")
        mass = self._tree.total()
        if not replacement:
            slots = self._draw_distinct(n, rng)
            values = self._tree.take(slots)
        else:
            uniforms = rng.random(n)
            if stratified:
                uniforms += np.arange(n)
                uniforms /= n
            else:
                uniforms.sort()  # neighbours in memory are visited one after the other
            slots, values = self._tree.draw(uniforms)
        self.num_draws += 1
        return Draw(slots, self._generation.take(slots), values / mass)

    def probability(self, slots: ArrayLike) -> Float64:
        """Return the probability `<float64>[n]` of drawing each slot from this sampler."""
        return self._tree.get(slots) / self.mass

    def priority(self, slots: ArrayLike) -> Float64:
        """Return the priority `<float64>[n]` of each slot, 0 where no item is live."""
        return self._priority.take(np.asarray(slots, dtype=np.int64))

    def priority_age_draws(self, slots: ArrayLike) -> Int64:
        """Return how many calls of `sample` came since each priority was written, `<int64>[n]`."""
        return self.num_draws - self._written_at.take(np.asarray(slots, dtype=np.int64))

    def generation(self, slots: ArrayLike) -> Int64:
        """Return the generation `<int64>[n]` of each slot, negative where no item is live."""
        return self._generation.take(np.asarray(slots, dtype=np.int64))

    def is_live(self, slots: ArrayLike) -> Bool:
        """Return whether each slot `<int64>[n]` holds an item that can be drawn."""
        return self.generation(slots) >= 0

    def check_priorities(self, priorities: ArrayLike) -> Float64:
        """Return `priorities` as float64; ValueError outside [0, `MAX_PRIORITY`] or for NaN."""
        values = np.ascontiguousarray(priorities, dtype=np.float64)
        # Read as unsigned numbers, doubles of at least +0 keep their order, and negative ones,
        # infinity and NaN are larger than all of them: one comparison finds every bad value.
        if values.size and np.maximum.reduce(values.view(np.uint64)) > _MAX_PRIORITY_BITS:
            bad = values[~((values >= 0.0) & (values <= MAX_PRIORITY))]
            if bad.size:  # not so for -0.0
                raise ValueError(
                    f"priority {bad[0]} is outside [0, {MAX_PRIORITY}]: "
                    "every later draw would be wrong"
                )
        return values

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the state, all arrays."""
        counters = [self.num_added, self.num_draws, self.num_stale]
        return {
            "masses": self._tree.get_state()["values"],
            "priority": self._priority.copy(),
            "generation": self._generation.copy(),
            "written_at": self._written_at.copy(),
            "counters": np.array(counters, dtype=np.int64),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Take over a state that `get_state` gave; ValueError on another capacity."""
        self._tree.set_state({"values": state["masses"]})
        self._priority = state["priority"].copy()
        self._generation = state["generation"].copy()
        self._written_at = state["written_at"].copy()
        self.num_added, self.num_draws, self.num_stale = (int(n) for n in state["counters"])
        self._size = int(np.count_nonzero(self._generation >= 0))

    def check_valid(self) -> tuple[bool, str]:
        """Return whether every invariant holds, and if not, which one is broken."""
        ok, why = self._tree.check_valid()
        if not ok:
            return False, f"tree: {why}"
        live = self._generation >= 0
        if np.any((self._tree.values > 0.0) != live) or np.any((self._priority > 0.0) != live):
            return False, "a slot has only some of generation, priority and mass"
        if np.any(self._priority[live] < self.min_priority):
            return False, "a live priority is below the floor"
        masses = self._priority[live] ** self.alpha
        if not np.allclose(self._tree.values[live], masses, rtol=1e-12, atol=0.0):
            return False, "a mass is not priority**alpha"
        if self._size != np.count_nonzero(live):
            return False, f"size {self._size}, but {np.count_nonzero(live)} live slots"
        if np.any(self._generation[live] % self.capacity != np.flatnonzero(live)):
            return False, "a generation is in a slot that is not its own"
        if np.any(self._generation >= self.num_added):
            return False, "a generation was never given out"
        return True, ""

    def _draw_distinct(self, n: int, rng: np.random.Generator) -> Int64:
        """Draw with replacement and reject what came up before, until `n` are distinct.

        Items drawn in one round are hidden from the next, which is the same as rejecting them.
        """
        rounds: list[Int64] = []
        masses: list[Float64] = []
        try:
            while n > 0:
                slots = self._tree.draw(rng.random(n))[0]
                first = np.unique(slots, return_index=True)[1]
                slots = slots[np.sort(first)]
                rounds.append(slots)
                masses.append(self._tree.get(slots))
                self._tree.set(slots, np.zeros(len(slots)))
                n -= len(slots)
        finally:
            for slots, mass in zip(rounds, masses, strict=True):
                self._tree.set(slots, mass)
        return np.concatenate(rounds)

    def _floored(self, priorities: ArrayLike) -> Float64:
        return np.maximum(self.check_priorities(priorities), self.min_priority)
