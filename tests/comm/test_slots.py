"""Batch slots: which rows wait, when a batch is due, and that each row gets its own action."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_wrappers import FAILURE_KINDS, StepBatch
from hpcrl.comm.loopback import World
from hpcrl.comm.slots import Client, StepSlots
from hpcrl.comm.wire import step_layout
from hpcrl.compression import available_codecs
from hpcrl.roles.actor import GroupChannel
from tests.small import env_spec

NO_FAILURES = dict.fromkeys(FAILURE_KINDS, 0)
SPEC = env_spec()  # observes (seed, episode, step)
ROWS = 2


class Served:
    """Clients' channels and the slots of rank 0 that serve them, all in this thread."""

    def __init__(
        self,
        clients,
        max_batch_rows=1000,
        max_wait_s=1e9,
        compression="none",
        max_message_bytes=2**30,
    ):
        self.clients = clients
        self.world = World(1 + max(client.rank for client in clients), deadline_s=5.0)
        self.link = self.world.link(0)
        links = [self.world.link(client.rank) for client in clients]
        for link in (self.link, *links):
            link.max_message_bytes = max_message_bytes
        self.slots = StepSlots(
            self.link, SPEC, clients, ROWS, 4, max_batch_rows, max_wait_s, compression
        )
        self.channels = [
            GroupChannel(link, SPEC, 0, client.group, ROWS, 0, compression)
            for link, client in zip(links, clients, strict=True)
        ]
        self.sent = [0] * len(clients)

    def send(self, client, *, poll=True, seconds=(0.0,) * 4, **columns):
        """Send a step whose observation tells (row id, 7, how many steps were sent before)."""
        ids = np.arange(client * ROWS, (client + 1) * ROWS)
        observation = np.stack([ids, [7] * ROWS, [self.sent[client]] * ROWS], 1)
        columns = {
            "reward": np.zeros(ROWS, np.float32),
            "valid": np.ones(ROWS, bool),
            "episode_return": np.zeros(ROWS, np.float32),
            "episode_steps": np.zeros(ROWS, np.int32),
            "final_observation": None,
            **{k: np.zeros(ROWS, bool) for k in ("terminated", "truncated", "restarted", "ended")},
            **{name: np.array(value) for name, value in columns.items()},
        }
        if columns["truncated"].any():
            columns["final_observation"] = {"obs": -1.0 - observation.astype(np.float32)}
        batch = StepBatch(observation={"obs": observation.astype(np.float32)}, **columns)
        timers = dict(zip("abcd", seconds, strict=True))
        self.channels[client].pack(batch, timers, NO_FAILURES)
        self.channels[client].send(batch)
        self.sent[client] += 1
        if poll:
            self.slots.poll()

    def answer(self, shuffle=np.asarray):
        """Answer what waits: each row with its own id. Return the slots and the rows."""
        taken = self.slots.take()
        rows, places = self.slots.rows(taken)
        order = shuffle(np.arange(len(places)))
        self.slots.reply(taken, places[order], rows.ids[order, None].astype(np.int32))
        return taken, rows


def clients_of(actors, groups):
    return [Client(1 + a, g) for a in range(actors) for g in range(groups)]


def test_a_batch_is_due_when_it_is_full():
    served = Served(clients_of(2, 2), max_batch_rows=2 * ROWS)
    assert not served.slots.due()
    served.send(3)
    assert not served.slots.due()
    served.send(0)
    assert served.slots.due()
    assert served.slots.num_waiting == 2


def test_a_batch_is_due_when_every_client_waits():
    served = Served(clients_of(3, 1))
    for client in (2, 0, 1):
        assert not served.slots.due()
        served.send(client)
    assert served.slots.due()
    taken, rows = served.answer()
    assert taken.tolist() == [0, 1, 2]
    assert rows.ids.tolist() == list(range(6))
    assert not served.slots.due()


def test_a_batch_is_due_when_its_first_row_has_waited_max_wait(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("hpcrl.comm.slots.time.perf_counter", lambda: now_s[0])
    served = Served(clients_of(3, 1), max_wait_s=0.5)
    now_s[0] += 10
    assert not served.slots.due()  # nothing waits
    served.send(1)
    now_s[0] += 0.4
    served.send(2)  # a later row does not start the clock anew
    assert not served.slots.due()
    now_s[0] += 0.125
    assert served.slots.due()
    assert served.slots.first_wait_s() == pytest.approx(0.525)
    served.answer()
    served.send(1)
    assert not served.slots.due()  # the next batch has a clock of its own


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    actors=st.integers(1, 3),
    groups=st.integers(1, 2),
    compression=st.sampled_from(available_codecs()),
)
def test_every_row_gets_its_own_action_whatever_the_orders(data, actors, groups, compression):
    served = Served(clients_of(actors, groups), compression=compression)
    number = len(served.clients)
    idle = set(range(number))
    for _ in range(data.draw(st.integers(1, 8))):
        some = st.lists(st.sampled_from(sorted(idle)), min_size=1, max_size=len(idle), unique=True)
        valid = {}
        for client in data.draw(some):
            valid[client] = data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
            served.send(client, valid=valid[client])
        sent = {client: served.sent[client] - 1 for client in valid}
        shuffle = np.random.default_rng(data.draw(st.integers(0, 9))).permutation
        taken, rows = served.answer(shuffle)
        assert taken.tolist() == sorted(valid)
        ids = [c * ROWS + row for c in sorted(valid) for row in range(ROWS) if valid[c][row]]
        assert rows.ids.tolist() == ids
        expected = [[row, 7, sent[row // ROWS]] for row in ids]
        assert rows.observation["obs"].tolist() == expected
        for client, flags in valid.items():
            own = [[client * ROWS + row if flags[row] else 0] for row in range(ROWS)]
            assert served.channels[client].receive().tolist() == own


def test_trap10_a_row_is_in_a_batch_once_and_a_restart_is_told_by_its_run_id():
    served = Served(clients_of(2, 1))
    run_ids = []
    for restarted in ([False, False], [False, True], [False, False]):
        for client in range(2):
            served.send(client, restarted=restarted if client else [False, False])
        _, rows = served.answer()
        assert rows.ids.tolist() == [0, 1, 2, 3]
        run_ids.append(rows.run_id.tolist())
        for channel in served.channels:
            channel.receive()
    assert run_ids == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]


def test_every_restart_of_the_job_begins_new_runs():
    world = World(2)
    slots = StepSlots(world.link(0), SPEC, [Client(1, 0)], ROWS, 4, 1, 0.0)
    channel = GroupChannel(world.link(1), SPEC, 0, 0, ROWS, restart=3)
    none = np.zeros(ROWS, bool)
    batch = StepBatch(
        {"obs": np.zeros((ROWS, 3), np.float32)},
        np.zeros(ROWS, np.float32),
        none,
        none,
        ~none,
        np.array([True, False]),
        None,
        none,
        np.zeros(ROWS, np.float32),
        np.zeros(ROWS, np.int32),
    )
    channel.pack(batch, dict.fromkeys("abcd", 0.0), NO_FAILURES)
    channel.send(batch)
    slots.poll()
    rows, _ = slots.rows(slots.take())
    assert rows.run_id.tolist() == [(3 << 32) + 1, 3 << 32]


def test_rows_are_copies_that_the_next_message_does_not_change():
    served = Served(clients_of(1, 1))
    served.send(0, reward=[1.5, 2.5], terminated=[True, False])
    _, rows = served.answer()
    served.channels[0].receive()
    served.send(0, reward=[9.0, 9.0], terminated=[False, True])
    assert rows.reward.tolist() == [1.5, 2.5]
    assert rows.terminated.tolist() == [True, False]
    assert rows.observation["obs"][:, 2].tolist() == [0, 0]


@pytest.mark.parametrize("compression", available_codecs())
def test_trap09_final_observations_travel_only_with_truncated_episodes(compression):
    served = Served(clients_of(3, 1), compression=compression)
    served.send(0, truncated=[False, True])
    served.send(1)
    served.send(2, truncated=[True, False], valid=[True, False])
    _, rows = served.answer()
    assert rows.truncated.tolist() == [False, True, False, False, True]
    final = rows.final_observation["obs"]
    assert final[1].tolist() == [-2, -8, -1]
    assert final[4].tolist() == [-5, -8, -1]
    for channel in served.channels:
        channel.receive()
    served.send(1)
    _, rows = served.answer()
    assert rows.final_observation is None


def test_a_message_without_truncated_episodes_ends_before_the_final_observations():
    served = Served(clients_of(2, 1))
    served.send(0, poll=False)
    served.send(1, poll=False, truncated=[True, False])
    short, full = [len(message.data) for mail in served.world.mail.values() for message in mail]
    assert full - short >= ROWS * SPEC.observation["obs"].array.nbytes


def test_messages_that_are_split_all_have_one_length_as_both_ends_must_split_them_alike():
    full = step_layout(SPEC, ROWS, 4).nbytes
    served = Served(clients_of(2, 1), max_message_bytes=full - 1)
    served.send(0, poll=False)
    served.send(1, poll=False, truncated=[True, False])
    lengths = [len(message.data) for mail in served.world.mail.values() for message in mail]
    assert lengths == [full, full]


def test_a_truncation_on_an_invalid_row_asks_for_no_final_observation():
    served = Served(clients_of(1, 1))
    served.send(0, truncated=[True, False], valid=[False, True])
    _, rows = served.answer()
    assert rows.ids.tolist() == [1]
    assert rows.final_observation is None


def test_trap20_and_21_episodes_are_whole_and_come_from_valid_rows_only():
    served = Served(clients_of(2, 1))
    raw = {"episode_return": [1234.5, -7.0], "episode_steps": [10, 3]}
    served.send(0, ended=[True, True], **raw)
    served.send(1, ended=[True, False], valid=[False, True], **raw)
    episodes = served.slots.episodes(served.slots.take())
    assert episodes.returns.tolist() == [1234.5, -7.0]
    assert episodes.steps.tolist() == [10, 3]


def test_each_actors_timers_count_once_however_many_groups_it_has():
    served = Served(clients_of(2, 2))
    for client, seconds in enumerate([1.0, 1.5, 10.0, 10.5]):
        served.send(client, seconds=(seconds, 0.0, 0.0, 2 * seconds))
    assert served.slots.timers_s().tolist() == [11.0, 0.0, 0.0, 22.0]


def test_a_lost_or_repeated_step_is_noticed():
    served = Served(clients_of(2, 1))
    served.send(1)
    served.answer()
    served.slots._sequence[1] += 1
    with pytest.raises(RuntimeError, match=r"step message 1 of rank 2 group 0: expected number 2"):
        served.send(1)


def test_a_reply_to_another_step_is_noticed():
    served = Served(clients_of(1, 1))
    served.send(0)
    served.slots._sequence[0] = 5
    served.answer()
    with pytest.raises(RuntimeError, match="reply to step 5, not 0"):
        served.channels[0].receive()


def test_stop_reaches_waiting_clients_and_those_that_still_step(monkeypatch):
    served = Served(clients_of(2, 2))
    served.send(0)
    served.send(2)
    late = [1, 3]
    poll = served.slots.poll

    def poll_after_one_more_came():
        if late:
            served.send(late.pop(), poll=False)
        return poll()

    monkeypatch.setattr(served.slots, "poll", poll_after_one_more_came)
    served.slots.stop(served.link)
    assert [channel.receive() for channel in served.channels] == [None] * 4
    served.slots.close()


def test_a_client_that_never_comes_is_named_at_the_end():
    served = Served(clients_of(3, 1))
    served.link.deadline_s = 0.05
    served.send(1)
    with pytest.raises(RuntimeError, match=r"waited at shut-down for a step of actor ranks \[1, 3"):
        served.slots.stop(served.link)
