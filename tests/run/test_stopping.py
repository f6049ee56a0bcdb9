"""When a run stops, and why."""

import os
import signal
import subprocess
import sys

import pytest

from hpcrl.config.sections import StopConfig
from hpcrl.run.counters import Counters, RollingReturns
from hpcrl.run.stopping import Stop, StopSignal, goal_reached, lead_problem

COUNTERS = Counters(learner_steps=5, agent_steps=1000, frames=4000, wall_time_s=60.0)


def returns_of(*scores):
    returns = RollingReturns()
    returns.extend((score, 1) for score in scores)
    return returns


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ({}, None),
        ({"agent_steps": 1001, "frames": 4001, "wall_time_s": 60.5}, None),
        ({"agent_steps": 1000}, "stop.agent_steps 1000 reached"),
        ({"frames": 4000}, "stop.frames 4000 reached"),
        ({"wall_time_s": 59.5}, "stop.wall_time_s 59.5 reached"),
        ({"agent_steps": 9999, "wall_time_s": 10}, "stop.wall_time_s 10 reached"),
    ],
)
def test_the_first_condition_that_holds_is_named(stop, reason):
    assert goal_reached(StopConfig(**stop), COUNTERS, None) == reason


def test_a_mean_return_counts_over_100_episodes_only():
    stop = StopConfig(mean_return=10.0)
    assert goal_reached(stop, COUNTERS, None) is None
    assert goal_reached(stop, COUNTERS, returns_of(*[50.0] * 99)) is None
    assert goal_reached(stop, COUNTERS, returns_of(*[9.9] * 100)) is None
    assert goal_reached(stop, COUNTERS, returns_of(*[10.0] * 100)) == "stop.mean_return 10 reached"


def test_a_mean_return_of_zero_is_a_goal():
    assert goal_reached(StopConfig(mean_return=0.0), COUNTERS, returns_of(*[0.0] * 100))


def test_a_goal_outvotes_a_requeue_and_a_requeue_going_on():
    assert max(Stop.NO, Stop.REQUEUE) is Stop.REQUEUE
    assert max(Stop.GOAL, Stop.REQUEUE) is Stop.GOAL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_only_sets_a_flag(number):
    stop_signal = StopSignal()
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        stop_signal.install()
        assert stop_signal.reason is None
        os.kill(os.getpid(), number)
        assert stop_signal.reason == f"signal {number.name}"
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_request_that_comes_while_the_process_ends_does_not_kill_it(number):
    """A module's globals are cleared after Python has given its signal handlers back."""
    program = (
        "import os, sys; from hpcrl.run.stopping import StopSignal\n"
        "class AtTheEnd:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, {int(number)})\n"
        "sys.at_the_end = AtTheEnd()\n"
        "stop_signal = StopSignal(); stop_signal.install(); stop_signal.ignore()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == 0


def test_the_deadline_stops(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr("hpcrl.run.stopping.time.time", lambda: now_s[0])
    stop_signal = StopSignal(stop_at_unix_s=1010.0)
    assert stop_signal.reason is None
    now_s[0] = 1010.0
    assert stop_signal.reason == "the deadline is near"


def test_lead_time_must_hold_two_checkpoints_and_a_minute():
    # 2 x 30 + 60 = 120
    assert lead_problem(120.0, 30.0) is None
    assert "give at least 121" in lead_problem(120.0, 30.5)
    assert "took 30.5 s" in lead_problem(120.0, 30.5)
