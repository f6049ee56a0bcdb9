"""Simulated cores, interfaces and time, by hand arithmetic."""

import pytest

from hpcrl.bench.events import Clock, Cores, Interface


def finish_times(count, works, nice=None, poll_share=0.0, waiting=0):
    clock = Clock()
    ends: dict[int, float] = {}
    cores = Cores(clock, count, poll_share)
    cores.waiting = waiting
    for index, work in enumerate(works):
        level = nice[index] if nice else 0
        cores.compute(work, lambda i=index: ends.__setitem__(i, clock.now), level)
    clock.run(1e9, 10_000)
    return [ends[index] for index in range(len(works))], cores


def test_no_task_runs_on_more_than_one_core():
    ends, cores = finish_times(4, [1.0, 2.0])
    assert ends == pytest.approx([1.0, 2.0])
    assert cores.busy_s == pytest.approx(3.0)


def test_three_equal_tasks_share_two_cores_and_speed_up_as_others_end():
    # 1 s of each at 2/3: all end at 1.5 s. With 1, 1 and 2 s: two end at 1.5 s, the third has
    # 1 s left and a core of its own.
    assert finish_times(2, [1.0, 1.0, 1.0])[0] == pytest.approx([1.5, 1.5, 1.5])
    assert finish_times(2, [1.0, 1.0, 2.0])[0] == pytest.approx([1.5, 1.5, 2.5])


def test_a_nicer_task_gets_less_and_nobody_more_than_a_core():
    # One core, weights 1 and 1/1.25: rates 5/9 and 4/9.
    assert finish_times(1, [5.0, 100.0], [0, 1])[0][0] == pytest.approx(9.0)
    # Two cores, weights 1, tiny, tiny: the first has a core, the others half of one each.
    ends, _ = finish_times(2, [1.0, 1.0, 1.0], [0, 40, 40])
    assert ends == pytest.approx([1.0, 1.5, 1.5])


def test_ranks_that_wait_take_a_part_of_the_cores():
    assert finish_times(1, [1.0], poll_share=0.01, waiting=50)[0] == pytest.approx([2.0])


def test_messages_come_in_one_after_the_other():
    clock = Clock()
    came: list[tuple[str, float]] = []
    interface = Interface(clock, latency_s=1.0, bytes_per_s=10.0)
    for name in "ab":
        interface.receive(20.0, lambda name=name: came.append((name, clock.now)))
    clock.run(1e9, 100)
    assert came == [("a", 3.0), ("b", 5.0)]
    assert interface.busy_s == 4.0


def test_what_is_due_at_once_runs_in_the_order_of_asking():
    clock = Clock()
    order: list[str] = []
    for name in "abc":
        clock.after(0.0, order.append, name)
    clock.run(0.0, 2)
    assert order == ["a", "b"]
