"""How rivals are counted and compared; that they run is tried by hand, as they take gigabytes."""

import time

import pytest

from benchmarks.rivals import compare, job


def metered(monkeypatch, notes, warm_up_s=10.0, seconds=20.0):
    clock = {"now": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    meter = job.Meter({"warm_up_s": warm_up_s, "seconds": seconds})
    overs = []
    for clock["now"], steps in notes:
        overs.append(meter.note(steps))
    return meter, overs


def test_the_warm_up_counts_for_nothing_and_the_end_is_told(monkeypatch):
    meter, overs = metered(monkeypatch, [(5, 1000), (12, 1500), (22, 2000), (32, 3500)])
    assert overs == [False, False, False, True]
    assert meter.rate() == pytest.approx((3500 - 1500) / (32 - 12))


@pytest.mark.parametrize("notes", [[], [(5, 100)], [(12, 100)]])
def test_a_run_without_two_notes_after_the_warm_up_has_no_rate(monkeypatch, notes):
    with pytest.raises(SystemExit, match="before it was measured"):
        metered(monkeypatch, notes)[0].rate()


def test_the_headline_is_our_best_over_the_best_rival_by_medians():
    rates = {
        "hpcrl_seed": [90.0, 100.0, 500.0],
        "hpcrl_impala": [120.0, 1.0, 130.0],
        **{"sb3": [50.0, 40.0, 1.0], "rllib_appo": [20.0] * 3},
    }
    found = compare.summarise(rates, {"sb3": "SB3 1", "rllib_appo": "RLlib 2"})
    assert found["ratio"] == pytest.approx(120.0 / 40.0)
    assert found["best_rival"] == "SB3 1"
    assert found["ratios"]["hpcrl_seed"] == pytest.approx({"SB3 1": 2.5, "RLlib 2": 5.0})
    assert found["ratios"]["hpcrl_impala"] == pytest.approx({"SB3 1": 3.0, "RLlib 2": 6.0})


def test_every_rival_has_its_program_and_its_requirements():
    for environment, (script, *_) in compare.RIVALS.values():
        assert (compare.HERE / script).exists()
        lines = (compare.HERE / "requirements" / f"{environment}.txt").read_text().splitlines()
        assert any(line.startswith("torch==") for line in lines)
        assert all("=" in line or "<" in line for line in lines if not line.startswith("#"))
