"""Advice on made-up runs that each wait for another side."""

import json

import pytest

from hpcrl.run.advise import advice_lines, steady_means
from hpcrl.run.run_dir import RunDirError

IDLE = {"learner_wait_share": 0.7}
RUNS = {
    "environments": {**IDLE, "actor_step_share": 0.9, "inference_forward_share": 0.2},
    "inference": {**IDLE, "actor_step_share": 0.2, "inference_forward_share": 0.85},
    "learner": {"learner_wait_share": 0.02, "inference_blocked_share": 0.8},
    "network": {**IDLE, "actor_step_share": 0.1, "inference_forward_share": 0.15},
}
KNOBS = {
    "environments": "topology.actors",
    "inference": "topology.inference",
    "learner": "topology.learners",
    "network": "env.envs_per_actor",
}


def write(tmp_path, records):
    lines = [json.dumps({"restart": 0, **record}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("side", RUNS)
def test_the_side_that_others_wait_for_is_named_with_figures_and_a_knob(tmp_path, side):
    # The start, in which everyone waited for the learner, does not count.
    write(tmp_path, [RUNS["learner"]] * 3 + [{**RUNS[side], "policy_lag": 2.0}] * 4)
    first, second, third = advice_lines(tmp_path)
    assert first.startswith(f"bottleneck: {side} (the learner waits ")
    assert f"{RUNS[side]['learner_wait_share']:.0%}" in first
    assert KNOBS[side] in second
    assert "2.0 learner steps" in third


def test_workers_are_not_told_to_add_inference_ranks(tmp_path):
    write(tmp_path, [RUNS["inference"]])
    (tmp_path / "topology.json").write_text('{"placement": "local"}', encoding="utf-8")
    first, second = advice_lines(tmp_path)
    assert first.startswith("bottleneck: inference")
    assert "topology.actors" in second
    assert "topology.inference" not in second


def test_an_all_reduce_that_takes_the_learners_time_is_the_network(tmp_path):
    write(tmp_path, [{"learner_wait_share": 0.05, "learner_all_reduce_share": 0.7}])
    assert advice_lines(tmp_path)[0].startswith("bottleneck: network")


def test_means_are_of_the_later_half_and_of_numbers():
    records = [{"a": 9}, {"a": 9}, {"a": 1, "b": None}, {"a": 3.0, "c": True}]
    assert steady_means(records) == {"a": 2.0}


def test_a_run_without_metrics_is_said_to_have_none(tmp_path):
    with pytest.raises(RunDirError, match="holds no metrics yet"):
        advice_lines(tmp_path)
