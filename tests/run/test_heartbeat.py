"""Signs of life: what is written, who counts as silent, and what it costs."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from hpcrl.run.heartbeat import DIED, LEFT, Beat, beats_folder, describe, read_beats, silent
from hpcrl.run.node_table import RECORD_BYTES, NodeTable, Offer
from hpcrl.run.stacks import answer_request, collect_stacks, newest_request, request_stacks
from hpcrl.run.watchdog import Silence, Watchdog
from hpcrl.timing import Pulse, StageTimer, Waiter

HOST = os.uname().nodename


def beat_of(rank, **changes):
    return Beat(rank, f"actor {rank}", HOST, os.getpid(), 0, 0.1)._replace(**changes)


NUM_RANKS = 200


def tables(folder, num_slots, node=0):
    """The tables of all ranks of a node."""
    offer = Offer()
    name = f"node-{node:05d}"
    return [
        NodeTable(folder, name, offer.facts, num_slots, slot, NUM_RANKS)
        for slot in range(num_slots)
    ]


def write(folder, beats, node=0, lost=()):
    own = tables(folder, len(beats), node)
    for table, beat in zip(own, beats, strict=True):
        table.put(beat, lost)
    own[0].write_if_due(beats[0])


def age(table, monkeypatch, seconds):
    """Let everyone believe that the file was written so long ago."""
    now_s = time.monotonic()
    monkeypatch.setattr("hpcrl.run.node_table.time.monotonic", lambda: now_s + seconds)


def test_a_nodes_ranks_share_a_table_and_the_first_writes_it(tmp_path, monkeypatch):
    first, second = tables(tmp_path, 2)
    second.put(beat_of(2, beats=7), ())
    second.write_if_due(beat_of(2))  # never written: it takes over
    (tmp_path / "logs" / "beats" / "node-00000").unlink()
    first.put(beat_of(1, beats=10**12, stage="forward_backward", host="h" * 300), ())
    first.write_if_due(beat_of(1))
    assert [(b.rank, b.beats) for b in read_beats(tmp_path)] == [(1, 10**12), (2, 7)]
    second.put(beat_of(2, beats=8), ())
    second.write_if_due(beat_of(2))
    assert read_beats(tmp_path)[1].beats == 7  # not its part
    age(second, monkeypatch, 3.0)
    second.write_if_due(beat_of(2))
    assert read_beats(tmp_path)[1].beats == 8  # the first one is silent
    second.put(beat_of(2, beats=9), ())
    second.write_if_due(beat_of(2))
    assert read_beats(tmp_path)[1].beats == 9  # and goes on at every tick
    first.write_if_due(beat_of(1))
    second.put(beat_of(2, beats=10), ())
    second.write_if_due(beat_of(2))
    assert read_beats(tmp_path)[1].beats == 9  # until the first one is back


def test_one_rank_of_a_node_looks_for_requests_and_the_others_learn_of_them(tmp_path):
    first, second = tables(tmp_path, 2)
    name = request_stacks(tmp_path)
    assert second.request == ""
    first.write_if_due(beat_of(1))
    assert (first.request, second.request) == (name, name)


def test_memory_of_another_container_is_not_taken_for_that_of_this_node(tmp_path):
    offer, other = Offer(), Offer()
    with pytest.raises(OSError, match="is not the memory"):
        NodeTable(tmp_path, "node-00000", [offer.facts[0], other.facts[1]], 1, 0, 1)


def test_records_of_two_nodes_are_read_by_rank(tmp_path):
    write(tmp_path, [beat_of(0)], node=1)
    write(tmp_path, [beat_of(2), beat_of(1)], node=0)
    assert [beat.rank for beat in read_beats(tmp_path)] == [0, 1, 2]


def test_a_record_with_every_field_at_its_longest_fits(tmp_path):
    longest = beat_of(
        10**6, name="n" * 100, host="h" * 300, pid=2**22, restart=10**6, tick_s=1 / 3,
        stage="forward_backward", beats=10**15, beat_unix_s=time.time(),
    )  # fmt: skip
    write(tmp_path, [longest])
    assert read_beats(tmp_path)[0].beats == 10**15
    lines = (beats_folder(tmp_path) / "node-00000").read_bytes().splitlines()
    assert max(map(len, lines)) < RECORD_BYTES


def test_however_many_have_died_all_of_them_are_known(tmp_path):
    dead = set(range(10, 110))
    write(tmp_path, [beat_of(rank) for rank in range(120)], lost=dead)
    assert {b.rank for b in read_beats(tmp_path) if b.stage == DIED} == dead


def test_the_dead_of_an_earlier_start_live_again(tmp_path):
    write(tmp_path, [beat_of(0), beat_of(1)], lost={1}, node=0)
    write(tmp_path, [beat_of(1, restart=1)], node=1)
    assert [(b.rank, b.stage) for b in read_beats(tmp_path)] == [(1, "start")]


def test_records_of_earlier_starts_and_unwritten_ones_are_passed_over(tmp_path):
    write(tmp_path, [beat_of(3, restart=1)], node=1)
    write(tmp_path, [beat_of(0, restart=0)], node=0)
    with (beats_folder(tmp_path) / "node-00001").open("ab") as file:
        file.write(b'{"rank": 3, "na\n')
    assert [beat.rank for beat in read_beats(tmp_path)] == [3]
    assert [beat.rank for beat in read_beats(tmp_path, restart=0)] == [0]


def test_silent_are_those_whose_loop_stands_still_and_neither_left_nor_died():
    beats = [
        beat_of(0, beat_unix_s=100.0),
        beat_of(1, beat_unix_s=90.0, stage="wait"),
        beat_of(2, beat_unix_s=80.0, stage=LEFT),
        beat_of(3, beat_unix_s=70.0, stage=DIED),
        beat_of(4, beat_unix_s=100.0),
        beat_of(5, beat_unix_s=60.0),
    ]
    assert [beat.rank for beat in silent(beats, 101.0)] == [5, 1]
    text = describe(beats[1], 101.0)
    assert f"actor 1 (rank 1, {HOST}, pid {os.getpid()}) silent for 11 s" in text
    assert "since it finished stage wait" in text


def test_a_waiting_loop_beats_and_so_does_every_stage():
    pulse = Pulse()
    waiter = Waiter("spin", 60.0, lambda: "", pulse)
    waiter.idle()
    assert (pulse.beats, pulse.stage) == (1, "start")
    StageTimer(("a", "b"), pulse=pulse).mark("b")
    assert (pulse.beats, pulse.stage) == (2, "b")


def test_silence_is_judged_by_changes_and_by_the_clock_of_the_one_that_watches():
    silence = Silence(timeout_s=10.0, start_timeout_s=30.0)
    late_at: dict[int, int] = {}
    for second in range(40):
        beats = [
            beat_of(0, beats=second, stage="wait"),
            beat_of(1, beats=min(second, 5), stage="wait"),
            beat_of(2, stage="start"),
            beat_of(3, stage=LEFT),
        ]
        for beat in silence.look(beats, float(second)):
            late_at.setdefault(beat.rank, second)
    assert late_at == {1: 16, 2: 31}


def test_one_that_was_stopped_itself_gives_the_others_their_time_again():
    silence = Silence(timeout_s=10.0, start_timeout_s=10.0)
    stuck = [beat_of(1, beats=7, stage="wait")]
    assert not silence.look(stuck, 0.0)
    assert not silence.look(stuck, 500.0)  # a gap: it saw nothing of what they did meanwhile
    looks = [bool(silence.look(stuck, 501.0 + i)) for i in range(12)]
    assert looks == [False] * 10 + [True] * 2


def test_the_one_that_died_by_the_word_of_another_is_not_waited_for():
    silence = Silence(timeout_s=2.0, start_timeout_s=2.0)
    for second in range(10):
        beats = [beat_of(0, beats=second), beat_of(1, stage=DIED)]
        assert not silence.look(beats, float(second))


def watch(folder, pulse, silence=None, end_job=lambda why: None, rank=0):
    (folder / "logs").mkdir(exist_ok=True)
    beat = beat_of(rank, tick_s=0.02)
    return Watchdog(pulse, beat, folder, tables(folder, 1)[0], silence, 60.0, end_job)


def until(condition):
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_heartbeat_is_that_of_the_loop_and_not_of_the_thread(tmp_path):
    pulse = Pulse()
    dog = watch(tmp_path, pulse)
    pulse.beats += 1
    until(lambda: [beat.beats for beat in read_beats(tmp_path)] == [1])
    first = read_beats(tmp_path)[0].beat_unix_s
    time.sleep(0.2)  # the thread goes on, the loop doesn't
    assert read_beats(tmp_path)[0].beat_unix_s == first
    dog.stop()
    assert read_beats(tmp_path)[0].stage == LEFT
    assert not list((tmp_path / "logs").glob("held-*"))


def test_ranks_that_start_later_are_known_long_before_the_next_tick(tmp_path):
    (tmp_path / "logs").mkdir()
    first, second = tables(tmp_path, 2)
    beat = beat_of(0, tick_s=1000.0)
    dog = Watchdog(Pulse(), beat, tmp_path, first, None, 0.0, lambda why: None)
    until(lambda: [b.rank for b in read_beats(tmp_path)] == [0])
    second.put(beat_of(1), ())
    until(lambda: [b.rank for b in read_beats(tmp_path)] == [0, 1])
    dog.stop()


def test_stacks_are_given_while_the_loop_stands_still(tmp_path):
    dog = watch(tmp_path, Pulse(), rank=3)
    name = request_stacks(tmp_path)
    answers, missing = collect_stacks(tmp_path, name, {3, 4}, wait_s=2.0)
    dog.stop()
    assert missing == {4}
    assert answers[3].startswith(f"actor 3 (rank 3, {HOST}, pid {os.getpid()})")
    assert "test_heartbeat.py" in answers[3]  # the main thread, too


def test_a_silent_rank_has_stacks_written_before_the_job_is_ended(tmp_path):
    reasons, ended = [], threading.Event()

    def end_job(why):
        reasons.append(why)
        ended.set()

    dog = watch(tmp_path, Pulse(), Silence(0.2, 0.2), end_job)
    assert ended.wait(20.0)
    dog.stop()
    assert "actor 0 (rank 0" in reasons[0]
    request = newest_request(tmp_path)
    assert (tmp_path / "logs" / "stacks" / request / "rank-00000").exists()


def test_an_answer_has_its_name_only_when_it_is_whole(tmp_path):
    name = request_stacks(tmp_path)
    answer_request(tmp_path, name, 7, "header")
    folder = tmp_path / "logs" / "stacks" / name
    assert [path.name for path in folder.iterdir()] == ["rank-00007"]
    assert newest_request(tmp_path) == name
    with pytest.raises(OSError, match="No such file"):
        answer_request(tmp_path, "absent", 7, "header")


def test_a_folder_that_cannot_be_read_for_a_moment_has_no_records(tmp_path, monkeypatch):
    """As an NFS server gives an error, the watching thread must live on."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "glob", fail)
    assert read_beats(tmp_path) == []
