"""Advice on runs that each wait for another side: figures of real runs, and made-up ones."""

import json

import pytest
import yaml

from benchmarks.bottlenecks import RUNS, config_of
from hpcrl.run.advise import Shape, advice_lines, advise, freshness_lines, steady_means
from hpcrl.run.run_dir import RunDirError
from tests.job_runner import run_to_end

IDLE = {"learner_wait_share": 0.7}
CENTRAL = Shape("seed", False, {"learner": 1, "inference": 1, "actor": 2})
LOCAL = Shape("impala", True, {"learner": 1, "worker": 2})
SYNC = Shape("sync", False, CENTRAL.ranks)

CASES = {
    "environments": ({**IDLE, "actor_step_share": 0.9, "inference_forward_share": 0.2}, CENTRAL),
    "environments_of_workers": (
        {**IDLE, "actor_step_share": 0.5, "inference_forward_share": 0.3},
        LOCAL,
    ),
    "environments_in_step": (
        # 40 % of the time is learning, and in what is left environments step most.
        {"learner_wait_share": 0.6, "inference_held_share": 0.4, "actor_step_share": 0.45},
        SYNC,
    ),
    "inference": (
        {**IDLE, "actor_step_share": 0.2, "inference_forward_share": 0.6}
        | {"inference_unroll_share": 0.2},
        CENTRAL,
    ),
    "inference_of_workers": (
        {**IDLE, "actor_step_share": 0.3, "inference_forward_share": 0.5},
        LOCAL,
    ),
    "learner": ({"learner_wait_share": 0.02, "inference_blocked_share": 0.8}, CENTRAL),
    "learner_in_step": ({"learner_wait_share": 0.35, "inference_held_share": 0.62}, SYNC),
    "network_of_rows": (
        {**IDLE, "actor_step_share": 0.3, "inference_forward_share": 0.2}
        | {"inference_batch_share": 0.3, "inference_unroll_share": 0.3},
        CENTRAL,
    ),
    "network_of_steps": ({**IDLE, "actor_send_share": 0.5, "actor_pack_share": 0.2}, CENTRAL),
    "network_of_unrolls": ({**IDLE, "inference_blocked_share": 0.4}, LOCAL),
    "network_of_gradients": ({"learner_wait_share": 0.1, "learner_all_reduce_share": 0.7}, CENTRAL),
    "network_latency": ({**IDLE, "actor_step_share": 0.1, "inference_forward_share": 0.2}, CENTRAL),
}
KNOBS = {
    "environments": "raise topology.actors (from 2 to about 7), on more cores",
    "environments_of_workers": "raise topology.actors (from 2 to about 7), on more cores",
    "environments_in_step": "raise topology.actors (from 2 to about 5), on more cores",
    "inference": "raise topology.inference (from 1 to about 4), set inference.precision bfloat16",
    "inference_of_workers": "raise topology.actors (from 2 to about 7), on more cores, or env.envs",
    "learner": "raise topology.learners (from 1 to about 5), set learner.precision bfloat16",
    "learner_in_step": "fewer agent.epochs",
    "network_of_rows": "let workers act where observations are",
    "network_of_steps": "let workers act where observations are",
    "network_of_unrolls": "raise learner.queue_unrolls and inference.credits_unrolls",
    "network_of_gradients": "raise learner.batch_unrolls, or use fewer topology.learners",
    "network_latency": "send fewer, larger messages (env.envs_per_actor)",
}


GRADIENT = Shape("async_gradient", True, {"learner": 1, "worker": 2})
PARTS = {
    "environments": "actor_step_share",
    "inference": "inference_forward_share",
    "learner": "worker_forward_backward_share",
    "network": "worker_exchange_share",
}


@pytest.mark.parametrize("side", PARTS)
def test_workers_that_compute_gradients_are_told_what_takes_most_of_their_time(side):
    means = {**dict.fromkeys(PARTS.values(), 0.15), PARTS[side]: 0.5, "learner_wait_share": 0.9}
    advice = advise(means, GRADIENT)
    assert advice.bottleneck == side
    assert "50%" in advice.figures
    assert "learners wait 90%" in advice.figures
    change = "raise learner.batch_unrolls" if side == "network" else "topology.actors (from 2 to"
    assert change in advice.change


def test_servers_that_are_busy_hold_gradient_workers_up():
    means = {"worker_exchange_share": 0.6, "learner_wait_share": 0.05}
    advice = advise(means, GRADIENT)
    assert advice.bottleneck == "learner"
    assert "topology.learners (from 1 to about 5)" in advice.change


def write(folder, records, **files):
    lines = [json.dumps({"restart": 0, **record}) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")


def test_the_lag_of_gradients_is_told_with_what_it_cost():
    means = {"gradient_lag": 2.25, "policy_lag": 2.0}
    (line,) = freshness_lines(means, {"gradient_lag_max": 7, "dropped_gradients": 3.0})
    assert "gradient lag: 2.2 versions of a shard, at most 7, 3 gradients dropped" in line


@pytest.mark.parametrize("case", CASES)
def test_the_side_that_others_wait_for_is_named_with_figures_and_a_knob(case):
    means, shape = CASES[case]
    advice = advise(means, shape)
    assert advice.bottleneck == case.split("_")[0]
    assert f"the learner waits {means['learner_wait_share']:.0%}" in advice.figures
    assert KNOBS[case] in advice.change


def test_the_start_does_not_count_and_ranks_are_those_of_the_run(tmp_path):
    roles = ["learner", *["worker"] * 3]
    topology = {"placement": "local", "ranks": [{"role": role} for role in roles]}
    write(
        tmp_path,
        [CASES["learner"][0]] * 3 + [CASES["environments_of_workers"][0]] * 4,
        topology_json=json.dumps(topology),
        config_yaml=yaml.safe_dump({"layout": "impala"}),
    )
    first, second = advice_lines(tmp_path)
    assert first.startswith("bottleneck: environments (the learner waits 70%")
    assert second == "try: raise topology.actors (from 3 to about 10), on more cores"


def test_old_and_dropped_unrolls_have_lines_of_their_own(tmp_path):
    record = {"policy_lag": 2.0, "policy_lag_max": 4, "unrolls_per_s": 10.0, "wall_time_s": 100.0}
    write(tmp_path, [{**CASES["learner"][0], **record, "stale_unrolls_dropped": 250}])
    lag, dropped = advice_lines(tmp_path)[2:]
    assert lag.startswith("policy lag: 2.0 learner steps, at most 4; lower it with learner.max_")
    assert dropped.startswith("250 unrolls were dropped as stale, about 25% of all: raise learner.")


def test_means_are_of_the_later_half_and_of_numbers():
    records = [{"a": 9}, {"a": 9}, {"a": 1, "b": None}, {"a": 3.0, "c": True}]
    assert steady_means(records) == {"a": 2.0}


def test_a_run_without_metrics_is_said_to_have_none(tmp_path):
    with pytest.raises(RunDirError, match="holds no metrics yet"):
        advice_lines(tmp_path)


@pytest.mark.parametrize("text", ["[1", '["central"]', '{"ranks": [{}]}'])
def test_a_damaged_topology_is_said_to_be(tmp_path, text):
    write(tmp_path, [IDLE], topology_json=text)
    with pytest.raises(RunDirError, match=r"topology\.json is damaged"):
        advice_lines(tmp_path)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("side", RUNS)
def test_real_runs_made_to_be_held_up_by_one_side_are_told_so(tmp_path, side):
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump(config_of(side, tmp_path / "run", seconds=6.0)))
    code, output = run_to_end(config)
    assert code == 0, output
    assert advice_lines(tmp_path / "run")[0].startswith(f"bottleneck: {side} (")
