"""A slow rank is found among others of its role, and named everywhere."""

import pytest

from hpcrl.run.heartbeat import DIED, read_beats
from hpcrl.run.metrics import read_metrics
from hpcrl.run.slowness import WorkRate, slow_ranks
from hpcrl.timing import Pulse
from tests.job_runner import TrainingJob, status_of
from tests.jobs.test_end_to_end import BASE, write_config
from tests.jobs.test_hang import hpcrl
from tests.run.test_heartbeat import beat_of


def working(rank, work_s, share=0.5, role="actor", **changes):
    return beat_of(rank, name=f"{role} {rank}", work_s=work_s, work_share=share, **changes)


def test_one_that_takes_more_than_twice_the_median_of_its_role_is_slow():
    beats = [working(rank, seconds) for rank, seconds in enumerate([1.0, 1.1, 2.1, 2.4, 0.9])]
    (slow,) = slow_ranks(beats)  # the median is 1.1
    assert slow.beat.rank == 3
    assert slow.factor == pytest.approx(2.4 / 1.1)
    assert slow.describe() == (
        f"actor 3 (rank 3, {beats[3].host}) is slow: its work takes 2.4e+03 ms, 2.2 times the "
        "median of the 5 ranks of its role"
    )


def test_roles_are_not_compared_with_each_other_and_of_two_the_faster_is_usual():
    beats = [working(0, 9.0, role="learner"), working(1, 1.0), working(2, 3.0)]
    assert [slow.beat.rank for slow in slow_ranks(beats)] == [2]


def test_who_loses_little_by_it_or_is_gone_or_has_not_worked_yet_is_not_slow():
    usual = [working(rank, 1.0) for rank in range(3)]
    assert not slow_ranks([*usual, working(3, 3.0, share=0.12)])  # loses 8 % of its time
    assert slow_ranks([*usual, working(3, 3.0, share=0.18)])  # loses 12 %
    assert not slow_ranks([*usual, working(3, 3.0, stage=DIED)])
    assert not slow_ranks([working(0, 0.0), working(1, 3.0)])


def test_work_is_measured_over_the_last_looks_only():
    pulse, rate = Pulse(), WorkRate()
    assert rate.look(pulse, 0.0) == (0.0, 0.0)
    pulse.work_s, pulse.works = 3.0, 2
    assert rate.look(pulse, 6.0) == (1.5, 0.5)
    for second in range(7, 30):
        pulse.work_s, pulse.works = pulse.work_s + 0.25, pulse.works + 1
        last = rate.look(pulse, float(second))
    assert last == (0.25, 0.25)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_actor_is_named_by_status_and_metrics(tmp_path):
    config, run_dir = write_config(
        tmp_path,
        env={"options": {"step_time_s": 0.004, "slow_rank": 3}},
        topology={**BASE["topology"], "actors": 3},
        run={"dir": str(tmp_path / "run"), "silence_timeout_s": 8},
        stop={"agent_steps": 10**9},
    )
    with TrainingJob(config) as job:
        job.wait_until(
            lambda: (
                "slow_ranks_are" in (read_metrics(run_dir) or [{}])[-1]
                and "is slow" in hpcrl("status", run_dir)[1]
            ),
            "slow rank",
        )
        shown = hpcrl("status", run_dir)[1]
        (victim,) = [beat for beat in read_beats(run_dir) if beat.rank == 3]
        record = next(r for r in reversed(read_metrics(run_dir)) if "slow_ranks_are" in r)
        job.kill()
    name = f"{victim.name} (rank 3, {victim.host}) is slow"
    assert victim.name == "actor 1"
    assert name in shown
    assert name in record["slow_ranks_are"]
    assert record["slow_ranks"] >= 1
    assert status_of(run_dir)["state"] == "running"
