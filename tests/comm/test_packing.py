"""Compressed step messages: what arrives is what was sent, and in how many bytes."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.comm.link import Incoming
from hpcrl.comm.loopback import World
from hpcrl.comm.packing import (
    PackedOutgoing,
    PackedSlots,
    check_length,
    make_outgoing,
    packed_nbytes,
)
from hpcrl.compression import available_codecs, make_codec
from hpcrl.config.load import ConfigError
from hpcrl.start.training import check_together
from tests.loopback_job import JobRun
from tests.small import config_of

CODECS = [name for name in available_codecs() if name != "none"]
SYNC = {"layout": "sync", "agent": {"name": "ppo"}, "topology": {"inference": 1, "actors": 2}}


class Way:
    """A buffer, a link, and a slot at its other end."""

    def __init__(self, nbytes, compression):
        self.world = World(2, deadline_s=5.0)
        self.buffer = np.zeros(nbytes, np.uint8)
        plane = self.world.link(1).plane("steps")
        lengths = range(1, nbytes + 1)
        self.outgoing = make_outgoing(plane, 0, 3, self.buffer, lengths, compression)
        self.slots = PackedSlots(1, nbytes, make_codec(compression))
        arrivals = [Incoming(1, 3, self.slots.buffer[0])]
        self.receivers = self.world.link(0).plane("steps").receivers(arrivals)

    def send(self, message):
        """Send a message; return what arrived, and in how many bytes."""
        self.buffer[: len(message)] = message
        self.receivers.start(0)
        sender = self.outgoing.ready(len(message))
        self.buffer[:] = 0  # packed already
        sender.start()
        travelled = [len(mail.data) for box in self.world.mail.values() for mail in box]
        while not self.receivers.poll():
            pass
        assert sender.done()
        arrived = np.full(len(self.buffer), 77, np.uint8)
        self.slots.unpack(0, arrived)
        assert (arrived[len(message) :] == 77).all()
        return arrived[: len(message)], travelled


@settings(max_examples=60, deadline=None)
@given(
    compression=st.sampled_from(CODECS),
    messages=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 256), st.integers(0, 99)),
        min_size=1,
        max_size=4,
    ),
)
def test_what_arrives_is_what_was_sent(compression, messages):
    way = Way(3000, compression)
    for length, values, seed in messages:
        message = np.random.default_rng(seed).integers(0, values, length, np.uint8)
        arrived, travelled = way.send(message)
        np.testing.assert_array_equal(arrived, message)
        assert travelled[0] <= 8 + 3000


@pytest.mark.parametrize("compression", CODECS)
def test_a_message_takes_the_bytes_that_it_needs(compression):
    way = Way(100_000, compression)
    quarter = np.zeros(100_000, np.uint8)
    quarter[:25_000] = np.random.default_rng(0).integers(0, 256, 25_000, np.uint8)
    _, (travelled,) = way.send(quarter)
    # Lengths are 0.8 of one another, so up to a quarter more than the noise in it.
    assert 25_000 < travelled < 1.3 * 25_000
    _, (travelled,) = way.send(np.zeros(100_000, np.uint8))
    assert travelled < 1000


@pytest.mark.parametrize("compression", CODECS)
def test_training_is_the_same_with_it(monkeypatch, tmp_path, compression):
    unrolls, packed_steps, unpacked_steps = [], [], []
    ready, unpack = PackedOutgoing.ready, PackedSlots.unpack

    def note_ready(self, nbytes):
        packed_steps.append(nbytes)
        return ready(self, nbytes)

    def note_unpack(self, slot, message):
        unpacked_steps.append(slot)
        return unpack(self, slot, message)

    monkeypatch.setattr(PackedOutgoing, "ready", note_ready)
    monkeypatch.setattr(PackedSlots, "unpack", note_unpack)
    for name in ("none", compression):
        assert packed_steps == unpacked_steps == []
        job = JobRun(monkeypatch)
        config = config_of(
            **SYNC,
            learner={"batch_unrolls": 8, "unroll_steps": 3, "backend": "mpi"},
            run={"dir": str(tmp_path / name)},
            env={"name": "synthetic:counting", "envs_per_actor": 4, "groups": 1},
            stop={"agent_steps": 100},
            transport={"compression": name, "deadline_s": 60.0, "start_deadline_s": 60.0},
        )
        assert job.start(config, 4).codes == [0] * 4
        key = lambda unroll: (int(unroll["env_id"]), int(unroll["unroll_index"]))  # noqa: E731
        unrolls.append(sorted(job.all_unrolls, key=key))
    assert len(packed_steps) == len(unpacked_steps) > 0
    plain, packed = unrolls
    assert len(plain) == len(packed) > 0
    for one, other in zip(plain, packed, strict=True):
        for field in ("obs:obs", "reward", "terminated", "start", "unroll_index", "env_id"):
            np.testing.assert_array_equal(one[field], other[field])


def test_what_may_have_to_be_split_is_refused():
    check_length(10**6, 10**6, "none")
    check_length(10**6, packed_nbytes(10**6), "zlib")
    with pytest.raises(ValueError, match=r"compression zlib: .* 1000000 .* 1000008.* 1000007"):
        check_length(10**6, packed_nbytes(10**6) - 1, "zlib")


@pytest.mark.parametrize("section", ["transport", "replay"])
def test_a_codec_that_is_not_installed_is_refused_before_the_job_starts(monkeypatch, section):
    config = config_of(**{section: {"compression": "lz4"}})
    check_together(config)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ConfigError, match=rf"{section}\.compression: .*pip install lz4"):
        check_together(config)
