"""Counters and episodes reach the root whole, however they are cut into messages."""

import numpy as np
import pytest

from hpcrl.comm.loopback import World
from hpcrl.comm.stats import COUNTERS, StatsCollector, StatsReporter


def pair(ranks=1):
    world = World(1 + ranks)
    reporters = [StatsReporter(world.link(1 + i), 0, 0.0) for i in range(ranks)]
    return StatsCollector(world.link(0), range(1, 1 + ranks)), reporters


def episodes(first, count):
    numbers = np.arange(first, first + count)
    return numbers.astype(np.float32), (numbers + 1).astype(np.int32), numbers % 3 == 0


def drain(collector, reporter):
    while not reporter.done():
        collector.poll()
    collector.poll()


def test_totals_are_sums_over_ranks_and_reports():
    collector, reporters = pair(3)
    for report in range(4):
        for rank, reporter in enumerate(reporters):
            reporter.totals["rows"] += 10**rank
            reporter.totals["restarts"] = report  # a total that is set, not added to
            reporter.set_stages("inference", {"wait": 0.5 * (report + 1)})
            reporter.send()
        collector.poll()
    assert collector.totals["rows"] == 4 * 111
    assert collector.totals["restarts"] == 3 * 3
    assert collector.totals["inference_wait_s"] == pytest.approx(3 * 2.0)
    assert collector.totals.keys() == set(COUNTERS)


def test_every_episode_arrives_once_and_in_order_over_many_messages():
    collector, (reporter,) = pair()
    reporter.add_episodes(*episodes(0, 10))
    reporter.send()
    collector.poll()
    assert collector.take_episodes() == [(float(i), i + 1, i % 3 == 0) for i in range(10)]
    assert collector.take_episodes() == []
    reporter.add_episodes(*episodes(10, 1000))  # more than a message holds
    reporter.send()
    drain(collector, reporter)
    assert collector.take_episodes() == [(float(i), i + 1, i % 3 == 0) for i in range(10, 1010)]
    assert collector.totals["episodes"] == 1010


def test_a_report_is_due_at_its_interval(monkeypatch):
    now_s = [50.0]
    monkeypatch.setattr("hpcrl.comm.stats.time.monotonic", lambda: now_s[0])
    world = World(2)
    reporter = StatsReporter(world.link(1), 0, every_s=2.0)
    assert not reporter.due
    now_s[0] += 2.0
    assert reporter.due
    reporter.send()
    assert not reporter.due


def test_episodes_that_fill_a_message_do_not_wait_for_the_interval():
    """A thousand between two reports arrive before the second one, not ten reports later."""
    world = World(2)
    reporter = StatsReporter(world.link(1), 0, every_s=3600.0)
    collector = StatsCollector(world.link(0), [1])
    arrived = []
    for first in range(0, 1000, 50):
        reporter.add_episodes(*episodes(first, 50))
        if reporter.due:
            reporter.send()
        collector.poll()
        arrived += collector.take_episodes()
        assert first + 50 - len(arrived) < 300
    assert [episode.score for episode in arrived] == list(range(len(arrived)))
    assert len(arrived) >= 768
