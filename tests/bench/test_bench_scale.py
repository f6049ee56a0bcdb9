import pytest

from hpcrl.bench.scale import Case, bench_scale, rates, summarise


def case(ranks, steps, mode="sleep", wait="auto"):
    figures = {"batch_rows": 1.0, "row_wait_ms": 1.0, "policy_lag": 1.0, "first_step_s": 9.0}
    return {"ranks": ranks, "wait": wait, "mode": mode, "env_steps_per_s": steps, **figures}


def test_efficiency_is_the_rate_per_rank_over_that_of_the_fewest_ranks():
    found = summarise([case(4, 200.0), case(8, 360.0), case(64, 1600.0)], 0.02, 8)
    assert found.ratio == found.figures["efficiency_at_max"] == pytest.approx(0.5)
    assert found.figures["ranks_at_max"] == 64
    assert found.figures["efficiency"]["sleep, auto"] == pytest.approx({4: 1.0, 8: 0.9, 64: 0.5})


def test_environments_that_compute_are_held_against_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    found = summarise([case(1, 50.0, "compute"), case(64, 80.0, "compute")], 0.02, 8)
    assert found.ratio == pytest.approx(80.0 / (2 / 0.02))


def test_the_warm_up_is_left_out_and_the_start_counts_from_the_launch():
    records = [
        {
            "wall_time_s": float(second),
            "time_unix_s": 107.0 + second,
            "env_steps_per_s": 100.0 * second,
            **{"batch_rows": 2.0, "row_wait_ms": 0.0, "policy_lag": 0.0},
        }
        for second in (1, 2, 3)
    ]
    found = rates(Case(4, "auto", "sleep"), records, 100.0, 2.0)
    assert found["env_steps_per_s"] == 250.0
    assert found["first_step_s"] == 8.0


@pytest.mark.mpi
def test_sleeping_environments_are_stepped_at_their_pace():
    found = bench_scale([1, 2], 0.02, 2, 3.0, ["auto"], ["sleep"])
    one, two = found.figures["cases"]
    # An actor sleeps through its environments one after the other: at most 50 steps/s, and a
    # window of one second may count some of the window before.
    assert 0 < one["env_steps_per_s"] <= 60
    assert one["env_steps_per_s"] < two["env_steps_per_s"] <= 120
