"""Stage timers over a clock that the test turns, and what a waiter sleeps."""

from types import SimpleNamespace

import pytest

from hpcrl.comm.link import wait_until
from hpcrl.timing import DeadlineError, Pulse, StageTimer, Waiter, choose_wait_policy


class Clock:
    """Time that passes only by `sleep` and by hand."""

    def __init__(self):
        self.now = 100.0
        self.sleeps = []
        self.yields = 0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    def give_up_the_core():
        clock.yields += 1

    time = SimpleNamespace(monotonic=clock, sleep=clock.sleep)
    monkeypatch.setattr("hpcrl.timing.time", time)
    monkeypatch.setattr("hpcrl.timing.os", SimpleNamespace(sched_yield=give_up_the_core))
    return clock


def test_time_belongs_to_the_stage_that_ends_it():
    clock = Clock()
    timer = StageTimer(("wait", "step", "unused"), clock)
    for stage, seconds in [("wait", 1.0), ("step", 2.0), ("wait", 4.0)]:
        clock.now += seconds
        timer.mark(stage)
    clock.now += 8.0
    assert timer.seconds == {"wait": 5.0, "step": 2.0, "unused": 0.0}


def test_the_work_of_a_loop_is_told_to_its_pulse():
    clock, pulse = Clock(), Pulse()
    timer = StageTimer(("wait", "step"), clock, pulse, work="step")
    for stage, seconds in [("wait", 1.0), ("step", 2.0), ("wait", 4.0), ("step", 8.0)]:
        clock.now += seconds
        timer.mark(stage)
    assert (pulse.work_s, pulse.works) == (10.0, 2)


def test_stages_add_up_to_the_elapsed_time():
    clock = Clock()
    timer = StageTimer(("a", "b"), clock)
    for number in range(100):
        clock.now += number * 0.25
        timer.mark("ab"[number % 2])
    assert sum(timer.seconds.values()) == 0.25 * sum(range(100))


def test_an_undeclared_stage_is_an_error():
    with pytest.raises(KeyError, match="dance"):
        StageTimer(("wait",)).mark("dance")


def test_backoff_sleeps_a_quarter_of_the_time_waited_within_bounds(clock):
    waiter = Waiter("backoff", 60.0, lambda: "")
    started = clock.now
    for _ in range(200):
        waited_s = clock.now - started
        waiter.idle()
        assert clock.sleeps[-1] == pytest.approx(min(2e-3, max(20e-6, 0.25 * waited_s)))
    assert clock.sleeps[-1] == 2e-3


def test_progress_makes_backoff_start_anew(clock):
    waiter = Waiter("backoff", 60.0, lambda: "")
    for _ in range(200):
        waiter.idle()
    waiter.progress()
    waiter.idle()
    assert clock.sleeps[-1] == 20e-6


def test_backoff_sleeps_no_longer_than_it_is_told(clock):
    waiter = Waiter("backoff", 60.0, lambda: "")
    for _ in range(200):
        waiter.idle(at_most_s=0.5e-3)
    assert max(clock.sleeps) == 0.5e-3
    waiter.idle(at_most_s=1.0)
    assert clock.sleeps[-1] == 2e-3


@pytest.mark.parametrize(("policy", "yields"), [("spin", 0), ("yield", 10)])
def test_only_backoff_sleeps(clock, policy, yields):
    waiter = Waiter(policy, 60.0, lambda: "")
    for _ in range(10):
        waiter.idle()
    assert clock.sleeps == []
    assert clock.yields == yields


@pytest.mark.parametrize("policy", ["spin", "yield", "backoff"])
def test_the_deadline_tells_who_waited_for_what(clock, policy):
    described = []

    def describe():
        described.append(clock.now)
        return "actor 3 waited for inference 0"

    waiter = Waiter(policy, 5.0, describe)
    waiter.idle()
    clock.now += 4.9
    waiter.idle()
    assert described == []
    clock.now += 0.2
    with pytest.raises(DeadlineError, match=r"^actor 3 waited for inference 0: nothing for 5\.1 s"):
        waiter.idle()
    assert len(described) == 1


def test_the_deadline_counts_from_the_last_progress(clock):
    waiter = Waiter("spin", 5.0, lambda: "")
    for _ in range(5):
        waiter.idle()
        clock.now += 4.0
        waiter.progress()
    waiter.idle()
    clock.now += 5.1
    with pytest.raises(DeadlineError):
        waiter.idle()


def test_time_before_the_first_idle_does_not_count(clock):
    waiter = Waiter("spin", 5.0, lambda: "")
    clock.now += 100.0
    waiter.idle()


def test_wait_until_polls_until_done_and_counts_as_progress(clock):
    waiter = Waiter("backoff", 5.0, lambda: "")
    polls = iter([False, False, True])
    wait_until(lambda: next(polls), waiter)
    assert next(polls, "used up") == "used up"
    clock.now += 100.0
    waiter.idle()


def test_wait_until_does_not_wait_for_what_is_done(clock):
    wait_until(lambda: True, Waiter("backoff", 5.0, lambda: ""))
    assert clock.sleeps == []


@pytest.mark.parametrize(
    ("configured", "ranks", "cores", "policy"),
    [
        ("auto", 2, 2, "yield"),
        ("auto", 3, 2, "backoff"),
        ("spin", 100, 2, "spin"),
        ("yield", 100, 2, "yield"),
        ("backoff", 1, 64, "backoff"),
    ],
)
def test_auto_backs_off_when_ranks_outnumber_cores(configured, ranks, cores, policy):
    assert choose_wait_policy(configured, ranks, cores) == policy


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'sleep' is none of auto, spin, yield, backoff"):
        choose_wait_policy("sleep", 1, 1)
