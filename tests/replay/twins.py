"""Naive twins: the same structures as lists of Python objects, and a counting stream."""

from dataclasses import dataclass

import numpy as np

from hpcrl.replay.layout import ReplayLayout
from hpcrl.replay.records import ReplayUnroll
from hpcrl.specs import ArraySpec


class NaiveSumTree:
    """A list of values, scanned from the left."""

    def __init__(self, capacity):
        self.values = [0.0] * capacity

    def set(self, indices, values):
        for index, value in zip(indices, values, strict=True):
            self.values[index] = float(value)

    def total(self):
        return sum(self.values)

    def query(self, target):
        running = 0.0
        for index, value in enumerate(self.values):
            running += value
            if running > target:
                return index
        raise AssertionError(f"{target} is not below the total")


@dataclass
class NaiveItem:
    generation: int
    slot: int
    priority: float
    live: bool


class NaiveSampler:
    """A list of items, oldest first."""

    def __init__(self, capacity, alpha, floor):
        self.capacity, self.alpha, self.floor = capacity, alpha, floor
        self.items = []
        self.num_added = 0
        self.num_stale = 0

    def add(self, priorities, eligible):
        for priority, live in zip(priorities, eligible, strict=True):
            slot = self.num_added % self.capacity
            self.items = [item for item in self.items if item.slot != slot]
            priority = max(float(priority), self.floor)
            self.items.append(NaiveItem(self.num_added, slot, priority, bool(live)))
            self.num_added += 1

    def remove(self, slots):
        for item in self.items:
            if item.slot in slots:
                item.live = False

    def update(self, slots, generations, priorities):
        for slot, generation, priority in zip(slots, generations, priorities, strict=True):
            found = [
                i for i in self.items if i.live and (i.slot, i.generation) == (slot, generation)
            ]
            if found:
                found[0].priority = max(float(priority), self.floor)
            else:
                self.num_stale += 1

    def probabilities(self):
        masses = np.zeros(self.capacity)
        for item in self.items:
            if item.live:
                masses[item.slot] = item.priority**self.alpha
        return masses / masses.sum() if masses.sum() else masses

    @property
    def size(self):
        return sum(item.live for item in self.items)


STARTS_EVERY = 7
"""The counting stream begins an episode at every seventh step."""


def counting_layout(**geometry):
    """Rows that say which environment, run and step they are; items that say who they are."""
    rows = {
        "frame": ArraySpec((2, 2), "int32"),
        "depth": ArraySpec((), "int32"),
        "reward": ArraySpec((), "float32"),
        "start": ArraySpec((), "bool"),
    }
    items = {"identity": ArraySpec((4,), "int64"), "core_state": ArraySpec((3,), "float32")}
    stack = geometry.pop("stack", 1)
    return ReplayLayout(rows, items, stacks={"frame": stack}, **geometry)


def counting_row(env, run, step):
    """Leaves of one row: never zero, different for every (env, run, step)."""
    frame = np.array([[env + 1, run + 1], [step + 1, 7 * step + env + 1]], np.int32)
    return {
        "frame": frame,
        "depth": np.int32(1000 * (env + 1) + step),
        "reward": np.float32(step + 0.5),
        "start": np.bool_(step % STARTS_EVERY == 0),
    }


def counting_unroll(layout, env, run, k, priorities=None, eligible=None):
    """Unroll k of a run: steps k T .. k T + T."""
    steps = range(k * layout.unroll_length, (k + 1) * layout.unroll_length + 1)
    rows = [counting_row(env, run, step) for step in steps]
    num_items = layout.items_per_unroll
    identity = np.array([[env, run, k, m] for m in range(num_items)], np.int64)
    return ReplayUnroll(
        stream_id=env,
        run_id=run,
        unroll_index=k,
        rows={path: np.stack([row[path] for row in rows]) for path in layout.rows},
        items={
            "identity": identity,
            "core_state": identity[:, :3].astype(np.float32) + 0.25,
        },
        priorities=np.ones(num_items) if priorities is None else np.asarray(priorities),
        eligible=eligible,
    )


def item_steps(layout, k, m):
    """First row needed (stack prefix), first loss row and bootstrap row of item m of unroll k."""
    end = k * layout.unroll_length + (m + 1) * layout.period
    loss = end - layout.sequence_length
    return loss - layout.burn_in - layout.stack_prefix, loss, end


class NaiveShard:
    """The stored unrolls as a list; what can be sampled follows from which steps they hold."""

    def __init__(self, layout, capacity_unrolls):
        self.layout, self.capacity = layout, capacity_unrolls
        self.unrolls = []  # (env, run, k), oldest first

    def add(self, env, run, k):
        self.unrolls = [*self.unrolls, (env, run, k)][-self.capacity :]

    def stored_steps(self, env, run, with_bootstrap=True):
        T = self.layout.unroll_length
        unrolls = [k for e, r, k in self.unrolls if (e, r) == (env, run)]
        return {step for k in unrolls for step in range(k * T, k * T + T + with_bootstrap)}

    def num_stored_rows(self):
        return sum(len(self.stored_steps(*key)) for key in {(e, r) for e, r, _ in self.unrolls})

    def sampleable(self):
        """Identities of the items whose loss rows exist and of which no row was given up.

        A bootstrap row that no unroll followed can only be the last row of an item.
        """
        found = set()
        for env, run, k in self.unrolls:
            steps = self.stored_steps(env, run, with_bootstrap=False)
            for m in range(self.layout.items_per_unroll):
                first, loss, end = item_steps(self.layout, k, m)
                if loss >= 0 and set(range(max(first, 0), end)) <= steps:
                    found.add((env, run, k, m))
        return found
