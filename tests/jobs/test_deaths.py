"""Under `--with-ft ulfm` the death of an actor or worker costs its environments only."""

import os
import signal

import numpy as np
import pytest

from hpcrl.comm.link import Incoming
from hpcrl.comm.loopback import World
from hpcrl.comm.slots import Client, StepSlots
from hpcrl.comm.wire import Command, Tag, reply_layout, step_layout
from hpcrl.node.slurm_env import survives_deaths
from hpcrl.run.heartbeat import lost_ranks, read_beats
from hpcrl.run.metrics import read_metrics
from tests.job_runner import TrainingJob, status_of
from tests.jobs.test_end_to_end import BASE, SLOW, write_config
from tests.jobs.test_hang import IMPALA, hpcrl
from tests.small import env_spec


class Actor:
    """The actor's end of a slot."""

    def __init__(self, link, spec, group):
        step, reply = step_layout(spec, 1, 0), reply_layout(spec, 1)
        buffer, answer = step.buffer(), reply.buffer()
        self.step, self.reply, self.count = step.views(buffer), reply.views(answer), 0
        self.step["valid"][:] = True
        plane = link.plane("steps")
        self.sender = plane.sender(0, Tag.STEP + group, buffer)
        self.receiver = plane.receivers([Incoming(0, Tag.REPLY + group, answer)])

    def send(self):
        self.step["sequence"][...] = self.count
        self.count += 1
        self.receiver.start(0)
        self.sender.start()

    @property
    def command(self):
        return Command(int(self.reply["command"])) if self.receiver.poll() else None


def make_slots(actors=4, groups=2, full_rows=4, max_wait_s=1e9):
    """Slots of one-environment groups, and their actors' ends by slot."""
    spec, world = env_spec(), World(actors + 1)
    link = world.link(0)
    clients = [Client(rank, group) for rank in range(1, actors + 1) for group in range(groups)]
    slots = StepSlots(link, spec, clients, 1, 0, full_rows, max_wait_s)
    ends = [Actor(world.link(client.rank), spec, client.group) for client in clients]
    return link, slots, ends


def answer(slots):
    batch = slots.take()
    rows, places = slots.rows(batch)
    slots.reply(batch, places, np.zeros((len(places), 1), np.int64))
    return batch.tolist(), rows.ids.tolist()


def test_dispatch_no_longer_waits_for_the_dead():
    link, slots, ends = make_slots(actors=2, groups=1, full_rows=100)
    ends[0].send()
    slots.poll()
    assert not slots.due()
    link.lost_ranks.add(2)
    slots.poll()
    assert slots.due()
    assert answer(slots) == ([0], [0])
    assert slots.num_lost == 1


def test_what_the_dead_had_sent_is_dropped_and_their_slots_are_never_used_again():
    link, slots, ends = make_slots(actors=2, groups=2, full_rows=100)
    for end in ends:
        end.send()
    slots.poll()
    link.lost_ranks.add(1)
    slots.poll()
    assert slots.num_waiting == 2
    assert answer(slots) == ([2, 3], [2, 3])
    assert [end.command for end in ends] == [None, None, Command.ACT, Command.ACT]
    ends[0].send()  # on its way when it died
    slots.poll()
    assert slots.num_waiting == 0


def test_one_that_dies_between_its_step_and_the_reply_is_not_answered():
    link, slots, ends = make_slots(actors=2, groups=1, full_rows=100)
    for end in ends:
        end.send()
    slots.poll()
    batch = slots.take()
    _, places = slots.rows(batch)
    link.lost_ranks.add(1)
    slots.poll()
    slots.reply(batch, places, np.zeros((2, 1), np.int64))
    assert [end.command for end in ends] == [None, Command.ACT]


def test_a_full_batch_is_the_same_share_of_those_that_are_left():
    link, slots, ends = make_slots(actors=4, groups=2, full_rows=4)  # half of 8 rows
    link.lost_ranks.update({1, 2})
    for slot, due in ((4, False), (5, True)):  # half of 4
        ends[slot].send()
        slots.poll()
        assert slots.due() == due


def test_shut_down_does_not_wait_for_the_dead():
    link, slots, ends = make_slots(actors=2, groups=1)
    ends[0].send()
    link.lost_ranks.add(2)
    slots.stop(link)
    assert ends[0].command is Command.STOP
    assert ends[1].command is None


@pytest.mark.parametrize(("value", "survives"), [("1", True), ("0", False), (None, False)])
def test_the_launcher_says_whether_deaths_are_survived(value, survives):
    environ = {} if value is None else {"OMPI_MCA_mpi_ft_enable": value}
    assert survives_deaths(environ) == survives


def start(folder, **sections):
    return write_config(
        folder,
        **{
            "env": SLOW,
            "run": {"dir": str(folder / "run"), "fault_tolerance": "ulfm"},
            "stop": {"agent_steps": 10**9},
            **sections,
        },
    )


def kill(run_dir, name):
    (victim,) = [beat for beat in read_beats(run_dir) if beat.name == name]
    os.kill(victim.pid, signal.SIGKILL)


def lost_actors(run_dir):
    records = read_metrics(run_dir)
    return records[-1]["lost_actors"] if records else 0


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_of_eight_actors_are_killed_and_the_run_ends_normally(tmp_path):
    config, run_dir = start(tmp_path, topology={**BASE["topology"], "actors": 8})
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        for index in range(5):
            kill(run_dir, f"actor {index}")
            job.wait_until(lambda: lost_actors(run_dir) == index + 1, "loss")  # noqa: B023
        job.wait_until(
            lambda: len(lost_ranks(read_beats(run_dir))) == 5, "word of them in the beats"
        )
        assert "actor 0 (rank 2), actor 1 (rank 3)" in hpcrl("status", run_dir)[1]
        steps = read_metrics(run_dir)[-1]["learner_steps"]
        job.wait_until(
            lambda: read_metrics(run_dir)[-1]["learner_steps"] > steps + 20, "training by three"
        )
        job.signal(signal.SIGTERM)
        assert job.finish() == 75
    status = status_of(run_dir)
    assert (status["state"], status["lost_actors"]) == ("requeue", 5)
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("rank-*.log"))
    assert logs.count("has died; the run goes on without it") == 5
    goal = status["counters"]["agent_steps"] + 100
    with TrainingJob(config, "--stop.agent_steps", goal) as job:
        assert job.finish() == 0


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_actors_do_not_keep_a_run_from_its_goal(tmp_path):
    config, run_dir = start(
        tmp_path, topology={**BASE["topology"], "actors": 3}, stop={"agent_steps": 4000}
    )
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        kill(run_dir, "actor 1")
        assert job.finish() == 0
    assert status_of(run_dir)["state"] == "done"
    assert status_of(run_dir)["counters"]["agent_steps"] == 4000
    assert status_of(run_dir)["lost_actors"] == 1


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_costs_its_environments_only(tmp_path):
    sections = {**IMPALA, "topology": {**IMPALA["topology"], "actors": 3}}
    config, run_dir = start(tmp_path, **sections)
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        kill(run_dir, "worker 1")
        job.wait_until(lambda: lost_actors(run_dir) == 1, "loss")
        steps = read_metrics(run_dir)[-1]["learner_steps"]
        job.wait_until(
            lambda: read_metrics(run_dir)[-1]["learner_steps"] > steps + 20, "training by two"
        )
        job.signal(signal.SIGTERM)
        assert job.finish() == 75
    assert status_of(run_dir)["lost_actors"] == 1


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["learner", "inference"])
def test_the_death_of_a_rank_that_others_need_ends_the_job(tmp_path, role):
    config, run_dir = start(tmp_path, topology={**BASE["topology"], "actors": 2})
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        kill(run_dir, f"{role} 0")
        assert job.finish() == 70
        assert "has died, and the run can't go on without it" in job.output
    assert status_of(run_dir)["state"] == "failed"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_any_actor_left_the_job_ends(tmp_path):
    config, run_dir = start(tmp_path)
    with TrainingJob(config) as job:
        job.wait_until(lambda: read_metrics(run_dir), "metrics")
        kill(run_dir, "actor 0")
        assert job.finish() == 70
        assert "all actors of inference 0 have died" in job.output
    assert "all actors of inference 0 have died" in status_of(run_dir)["verdict"]
