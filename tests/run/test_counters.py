import json
import random

import pytest

from hpcrl.run.counters import Counters, Meter, RollingReturns


def test_counters_survive_a_checkpoint():
    counters = Counters(3, 2**50, 2**52, 7, 1.25)
    assert Counters.from_dict(json.loads(json.dumps(counters.to_dict()))) == counters
    with pytest.raises(TypeError, match="steps"):
        Counters.from_dict({"steps": 1})


def test_means_are_over_the_last_hundred_episodes():
    rng = random.Random(0)
    window = RollingReturns()
    episodes: list[tuple[float, int]] = []
    assert window.values() == {
        "mean_return_100": None,
        "mean_episode_steps_100": None,
        "episodes_100": 0,
    }
    while len(episodes) < 300:
        new = [(rng.uniform(-9, 9), rng.randrange(1, 50)) for _ in range(rng.randrange(4))]
        window.extend(new)
        episodes += new
        if not episodes:
            continue
        last = episodes[-100:]
        assert window.values() == {
            "mean_return_100": pytest.approx(sum(score for score, _ in last) / len(last)),
            "mean_episode_steps_100": pytest.approx(sum(steps for _, steps in last) / len(last)),
            "episodes_100": len(last),
        }
        assert window.mean_return == window.values()["mean_return_100"]
        assert window.full == (len(episodes) >= 100)


def test_the_window_survives_a_checkpoint():
    window = RollingReturns()
    window.extend([(0.5, 3), (1.5, 5)])
    again = RollingReturns.from_list(json.loads(json.dumps(window.to_list())))
    for each in (window, again):
        each.extend([(4.0, 10)])
    assert again.values() == window.values()
    assert again.mean_return == 2.0


def test_rates_are_increases_over_elapsed_time():
    now = [100.0]
    meter = Meter({"frames": 1000.0}, clock=lambda: now[0])
    now[0] = 104.0
    assert meter.rates({"frames": 1400.0, "wait_s": 1.0}) == {"frames": 100.0, "wait_s": 0.25}
    now[0] = 114.0
    assert meter.rates({"frames": 1400.0, "wait_s": 6.0}) == {"frames": 0.0, "wait_s": 0.5}
    assert meter.rates({"frames": 1400.0}) == {"frames": 0.0}
