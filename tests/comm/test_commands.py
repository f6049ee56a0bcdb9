"""A learner's commands and its clients' word that they are done."""

import pytest

from hpcrl.comm.commands import CommandReceiver, CommandSender
from hpcrl.comm.loopback import World
from hpcrl.comm.wire import Command
from hpcrl.timing import DeadlineError


def cell(clients=2):
    world = World(1 + clients, deadline_s=0.2)
    sender = CommandSender(world.link(0), range(1, 1 + clients))
    return sender, [CommandReceiver(world.link(1 + i), 0) for i in range(clients)]


def test_commands_reach_every_client_once_and_in_order():
    sender, receivers = cell()
    assert [receiver.poll() for receiver in receivers] == [None, None]
    sender.send(Command.STOP)
    sender.send(Command.EXIT)
    for receiver in receivers:
        assert [receiver.poll() for _ in range(3)] == [Command.STOP, Command.EXIT, None]


def test_the_learner_serves_until_every_client_is_done():
    sender, receivers = cell(3)
    served: list[int] = []

    def serve():
        served.append(len(served))
        if len(served) % 2 == 0:
            receivers[len(served) // 2 - 1].say_done()

    sender.await_done(serve)
    assert len(served) == 6


def test_a_client_that_is_never_done_is_named():
    sender, receivers = cell(3)
    receivers[0].say_done()
    receivers[2].say_done()
    with pytest.raises(DeadlineError, match=r"waited at shut-down for ranks \[2\]: nothing for"):
        sender.await_done(lambda: None)
