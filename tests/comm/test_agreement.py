"""Votes: one outcome for all, in the order in which they were cast."""

import random
import threading

import pytest

from hpcrl.comm.agreement import Agreement
from hpcrl.comm.loopback import World
from hpcrl.timing import DeadlineError
from tests.loopback_runner import run_loopback

FIELDS = {"stop": "max", "ready": "min", "frames": "sum"}


def lonely_agreement(fields=FIELDS):
    return Agreement(World(1).link(0).group([0]), fields)


def test_fields_are_reduced_by_their_rules():
    votes = [
        {"stop": 0, "ready": 1, "frames": 10.5},
        {"stop": 1, "ready": 0, "frames": 20},
        {"frames": 3, "ready": 1, "stop": 0},
    ]
    outcomes = run_loopback(
        lambda link: Agreement(link.group([0, 1, 2]), FIELDS).vote(votes[link.rank]), 3
    )
    assert outcomes == [{"stop": 1.0, "ready": 0.0, "frames": 33.5}] * 3


def test_large_counts_are_exact():
    count = 2**53 - 1
    assert lonely_agreement().vote({"stop": 0, "ready": 0, "frames": count})["frames"] == count


def test_sums_of_floats_are_equal_to_the_last_bit_on_all_members():
    values = [0.1, 1e16, -1e16, 0.3]
    sums = run_loopback(
        lambda link: Agreement(link.group(range(4)), {"x": "sum"}).vote({"x": values[link.rank]}), 4
    )
    assert len({value["x"].hex() for value in sums}) == 1


def test_there_is_no_outcome_while_a_vote_is_missing():
    world = World(2)
    agreements = [Agreement(world.link(r).group([0, 1]), {"stop": "max"}) for r in range(2)]
    assert agreements[0].poll() is None
    agreements[0].start({"stop": 1})
    assert agreements[0].poll() is None
    assert agreements[1].poll() is None
    agreements[1].start({"stop": 0})
    assert [a.poll() for a in agreements] == [{"stop": 1.0}] * 2
    assert [a.poll() for a in agreements] == [None, None]


def test_the_nth_outcome_is_that_of_everyones_nth_vote():
    rounds = 50

    def body(link):
        agreement = Agreement(link.group([0, 1, 2]), {"round": "max", "same": "min"})
        lag = random.Random(link.rank)
        outcomes = []
        for number in range(rounds):
            agreement.start({"round": number, "same": number})
            for _ in range(lag.randrange(3)):
                threading.Event().wait(0.0005)
            while (outcome := agreement.poll()) is None:
                pass
            outcomes.append(outcome)
        return outcomes

    expected = [{"round": float(n), "same": float(n)} for n in range(rounds)]
    assert run_loopback(body, 3) == [expected] * 3


def test_a_vote_cannot_be_cast_before_the_previous_outcome_is_fetched():
    agreement = lonely_agreement()
    values = {"stop": 0, "ready": 0, "frames": 0}
    agreement.start(values)
    with pytest.raises(RuntimeError, match="before the outcome of the previous"):
        agreement.start(values)
    assert agreement.poll() is not None
    agreement.start(values)


@pytest.mark.parametrize("values", [{"stop": 1}, dict.fromkeys([*FIELDS, "other"], 0)])
def test_a_vote_on_other_fields_is_refused(values):
    with pytest.raises(ValueError, match=r"agreed are \['frames', 'ready', 'stop'\]"):
        lonely_agreement().vote(values)


def test_a_missing_vote_is_named_by_the_deadline():
    agreement = Agreement(World(2, deadline_s=0.05).link(0).group([0, 1]), FIELDS)
    with pytest.raises(DeadlineError, match=r"rank 0.* a vote on stop, ready, frames: nothing for"):
        agreement.vote({"stop": 0, "ready": 0, "frames": 0})
