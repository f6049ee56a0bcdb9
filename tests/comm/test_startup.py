"""Start-up talk: data, verdicts that all ranks share, and pairs of ranks that can't talk."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.comm.startup import (
    FabricError,
    Failure,
    StartError,
    agree_to_start,
    broadcast_json,
    check_fabric,
    check_same,
    gather_json,
    ping,
)
from hpcrl.topology import TopologyConfig, plan_topology, uniform_node_map
from tests.loopback_runner import run_loopback

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def on_all_ranks(size, body):
    """`body(group)` on every rank of a loopback world."""
    return run_loopback(lambda link: body(link.group(range(size))), size)


@settings(max_examples=20, deadline=None)
@given(values=st.lists(JSON, min_size=1, max_size=4), data=st.data())
def test_every_member_sees_all_values_and_the_roots(values, data):
    root = data.draw(st.integers(0, len(values) - 1))

    def body(group):
        mine = values[group.rank]
        return gather_json(group, mine), broadcast_json(group, mine, root)

    for gathered, shared in on_all_ranks(len(values), body):
        assert gathered == json.loads(json.dumps(values))
        assert shared == json.loads(json.dumps(values[root]))


def verdicts(failures):
    """What each rank makes of these failures (None: fine)."""

    def body(group):
        try:
            agree_to_start(group, f"actor {group.rank}", failures[group.rank])
        except StartError as error:
            return str(error), error.code
        return None

    return on_all_ranks(len(failures), body)


def test_all_start_when_none_failed():
    assert verdicts([None] * 3) == [None] * 3


def test_one_failure_stops_all_with_its_message_and_code():
    assert verdicts([None, Failure("no such game", 2), None]) == [("actor 1: no such game", 2)] * 3


def test_equal_messages_are_told_once_and_the_greatest_code_counts():
    fine, same, other = None, Failure("no such game", 2), Failure("wrong launch", 71)
    text = "actor 0 and 2 more: no such game\nactor 3: wrong launch"
    assert verdicts([same, same, fine, other, same]) == [(text, 71)] * 5


def layouts_agree(digests):
    labels = [f"role {rank}" for rank in range(len(digests))]

    def body(group):
        try:
            check_same(group, "unrolls", digests[group.rank], labels)
        except StartError as error:
            return str(error), error.code
        return None

    return on_all_ranks(len(digests), body)


def test_equal_layouts_agree_and_ranks_without_one_do_not_matter():
    assert layouts_agree([7, 0, 7, 7]) == [None] * 4


def test_different_layouts_are_noticed_by_all_and_one_of_each_kind_is_named():
    results = layouts_agree([0, 2**62 + 1, 2**62 + 1, 2**62])
    assert len(set(results)) == 1
    message, code = results[0]
    assert message.startswith("unrolls differ between role 1 and role 3: ")
    assert code == 70


def topology_of(learners, inference, actors):
    config = TopologyConfig(learners=learners, inference=inference, actors=actors)
    return plan_topology(config, uniform_node_map(1, learners + inference + actors))


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 3, 5)])
def test_ranks_that_can_talk_pass_the_fabric_check(counts):
    topology = topology_of(*counts)

    def body(link):
        check_fabric(link, topology, 20.0)
        return [address for address, mail in link.world.mail.items() if mail]

    run_loopback(body, topology.world_size)


def test_a_rank_that_does_not_answer_is_named():
    topology = topology_of(1, 1, 2)

    def body(link):
        if link.rank == 3:
            return None  # this one can't be reached
        link.label = f"role of {link.rank}"
        try:
            check_fabric(link, topology, 0.3)
        except FabricError as error:
            return str(error)
        return None

    messages = run_loopback(body, 4)
    assert topology.parent_of[3] == 1
    expected = "fabric check: role of 1 (rank 1) heard nothing from ranks [3]: nothing for 0.3 s"
    assert messages == [None, expected, None, None]


def test_a_large_ping_arrives_whole():
    def body(link):
        ping(link, [1 - link.rank], 20.0, num_bytes=100_000)
        return True

    assert run_loopback(body, 2) == [True, True]


def test_gathered_texts_of_different_lengths_are_not_cut():
    values = ["x" * length for length in (0, 1, 1000, 65)]
    for gathered in on_all_ranks(4, lambda group: gather_json(group, values[group.rank])):
        assert gathered == values
