"""Tickets: in whatever order environments complete unrolls, none is learned from too late."""

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.acting.pacing import LagTickets, VersionShares


class Cell:
    """One source and its learner: counts learner steps and remembers who began with what."""

    def __init__(self, num_envs, per_step, max_lag, base):
        self.quota = LagTickets(num_envs, per_step, max_lag)
        self.per_step, self.learner, self.loaded = per_step, base, base
        self.begun: dict[int, int] = {}  # version of row 0 of each environment's unroll
        self.sent: deque[int] = deque()  # of each unroll on its way
        self.lags: list[int] = []
        self.completed = 0
        self.load()

    def load(self):
        """Take the newest weights."""
        before = self.quota.open.copy()
        self.loaded = self.learner
        self.quota.load(self.learner)
        for env in np.flatnonzero(self.quota.open & ~before):
            self.begun[int(env)] = self.loaded

    def complete(self, env):
        """An open environment completes its unroll; the last row begins the next if it may."""
        message = np.full((1, 8), self.begun.pop(env), np.uint8)
        before = self.quota.open.copy()
        before[env] = False
        self.quota.completed(np.array([env], np.intp))
        for other in np.flatnonzero(self.quota.open & ~before):
            self.begun[int(other)] = self.loaded
        self.completed += 1
        self.sent.extend(int(unroll[0, 0]) for unroll in self.quota.released([message]))

    def learn(self):
        """Step as often as there are batches."""
        while len(self.sent) >= self.per_step:
            batch = [self.sent.popleft() for _ in range(self.per_step)]
            self.lags += [self.learner - version for version in batch]
            self.learner += 1


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_no_unroll_is_too_old_and_somebody_can_always_go_on(data, per_step, max_lag, base):
    num_envs = data.draw(st.integers(1, per_step * (max_lag + 1)))
    cell = Cell(num_envs, per_step, max_lag, base)
    assert cell.quota.open.all()
    for _ in range(data.draw(st.integers(1, 80))):
        open_envs = np.flatnonzero(cell.quota.open)
        if len(open_envs) == 0:
            # Everyone waits, so the learner has all that it needs: newer weights must come.
            cell.learn()
            assert cell.learner > cell.loaded
            cell.load()
            assert cell.quota.open.any()
        elif data.draw(st.integers(0, 4)) == 0:
            cell.learn()
            cell.load()
        else:
            cell.complete(int(data.draw(st.sampled_from(open_envs.tolist()))))
    cell.learn()
    assert max(cell.lags, default=0) <= max_lag
    # None is lost: what was completed was learned from, is on its way, or is early.
    assert len(cell.lags) + len(cell.sent) + len(cell.quota._early) == cell.completed


def test_the_bound_is_reached_but_for_no_reason_exceeded():
    cell = Cell(num_envs=4, per_step=2, max_lag=1, base=7)
    for env in (3, 2, 1, 0):  # the last ticket first: the learner takes them in order
        assert not cell.sent
        cell.complete(env)
    assert not cell.quota.open.any()
    cell.learn()
    assert cell.lags == [0, 0, 1, 1]
    cell.load()
    assert cell.quota.open.sum() == 4


def test_those_that_have_waited_longest_begin_first():
    quota = LagTickets(num_envs=4, per_step=2, max_lag=1)
    quota.load(0)
    for env in (2, 0, 3, 1):
        quota.completed(np.array([env], np.intp))
    quota.load(1)
    np.testing.assert_array_equal(np.flatnonzero(quota.open), [0, 2])


def test_every_environment_owes_each_version_its_share():
    quota = VersionShares(num_envs=2, unrolls=2)
    both = np.array([0, 1], np.intp)
    quota.completed(both)
    assert quota.open.all()
    quota.completed(both[:1])
    np.testing.assert_array_equal(quota.open, [False, True])
    quota.load(1)
    assert quota.open.all()
