"""The comparison of layouts: which points of two curves are compared, and what a row shows."""

from benchmarks.layouts import return_at, table

SLOW = [[1.0, 100, 10.0], [2.0, 200, 20.0], [3.0, 300, 30.0]]
FAST = [[1.0, 250, 25.0], [2.0, 500, 50.0], [3.5, 750, 75.0]]


def result(curve, **figures):
    return {
        **{"seconds": 3.0, "env_steps_per_s": 1234.4, "policy_lag": 1.26, "policy_lag_max": 4},
        **{"batch_steps": 320, "batch_rows": 16.0},
        **{"learner_idle_share": 0.504, "actor_idle_share": 0.25, "curve": curve},
        **figures,
    }


def test_a_return_is_that_of_the_last_point_not_beyond():
    assert return_at(SLOW, 1, 299) == 20.0
    assert return_at(SLOW, 0, 3.0) == 30.0
    assert return_at(SLOW, 1, 99) is None


def test_equal_steps_are_those_that_the_slowest_reached_and_equal_time_is_the_shortest_run():
    results = {"seed": result(FAST), "sync": result(SLOW, policy_lag=0.0, policy_lag_max=0)}
    head, _, sync, seed = table(results).splitlines()
    assert head.endswith("| return at 300 steps | return at 3 s |")
    assert sync == "| `sync` | 1,234 | 0.0 | 0 | 320 | 16.0 | 50% | 25% | 30 | 30 |"
    assert seed == "| `seed` | 1,234 | 1.3 | 4 | 320 | 16.0 | 50% | 25% | 25 | 50 |"


def test_a_replay_has_ages_and_no_lag():
    row = table({"replay": result(SLOW)}).splitlines()[-1]
    assert row.startswith("| `replay` | 1,234 | - | - | 320 |")
