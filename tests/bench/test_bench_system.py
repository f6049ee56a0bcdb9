import os

import pytest

from hpcrl.bench.costs import Costs, random_batch, training_ms
from hpcrl.bench.system import CpuTimes, stage_shares, summarise, timer_share
from tests.small import brain_of, config_of, env_spec


def record(wall_s, steps, **more):
    return {
        "wall_time_s": wall_s,
        "time_unix_s": 1000.0 + wall_s,
        "agent_steps": steps,
        "frames": 4 * steps,
        "batch_rows": 8.0,
        "env_steps_per_s": 100.0,
        "learner_steps_per_s": 10.0,
        "policy_lag": 2.0,
        **more,
    }


def topology(*roles):
    return {"ranks": [{"role": role} for role in roles]}


def test_the_ratio_is_achieved_over_ideal_with_costs_before_and_after_averaged():
    first, second = Costs(1.0, 9.0, 2.0, 8), Costs(2.0, 0.5, 3.0, 8)
    steady = [record(10.0, 1000, actor_step_share=0.5), record(20.0, 3000, actor_step_share=0.7)]
    roles = topology("learner", "inference", "actor")
    cores = len(os.sched_getaffinity(0))
    idle_s = 7.0 * cores  # of ten seconds
    cpu = [CpuTimes(1010.0, 0.0, 1.0), CpuTimes(1020.0, 5.0, 1.0 + idle_s)]
    figures = summarise(config_of(), first, second, steady, roles, cpu)
    # 1.5 + 0.5 + 2.5 = 4.5 ms of one core per agent step; 2000 agent steps in 10 s.
    assert figures["ideal_steps_per_s"] == pytest.approx(1e3 * figures["cores"] / 4.5)
    assert figures["achieved_steps_per_s"] == pytest.approx(200.0)
    assert figures["achieved_frames_per_s"] == pytest.approx(800.0)
    assert figures["ratio"] == pytest.approx(200.0 / figures["ideal_steps_per_s"])
    assert figures["cpu_ms_per_step"] == pytest.approx(2.5)
    assert figures["idle_share"] == pytest.approx(0.7)
    assert figures["others_share"] == pytest.approx(max(0.0, 0.3 - 0.5 / cores))
    assert figures["stages"]["actor"]["step"] == pytest.approx(0.6)


def test_a_workers_time_is_shown_as_one_role():
    shares = {"actor_step_share": 0.4, "actor_pack_share": 0.0, "inference_forward_share": 0.5}
    steady = [record(1.0, 1, **shares, learner_wait_share=0.1)]
    found = stage_shares(config_of(), steady, topology("learner", "worker"))
    assert found == {"worker": {"step": 0.4, "forward": 0.5}, "learner": {"wait": 0.1}}


def test_shares_of_other_things_are_no_stages():
    shares = {"learner_wait_share": 0.5, "learner_most_shard_share": 0.7}
    shares |= {"replay_most_shard_share": 0.7, "priority_stale_share": 0.1}
    found = stage_shares(config_of(), [record(1.0, 1, **shares)], topology("learner", "actor"))
    assert found == {"learner": {"wait": 0.5}}


def test_the_stage_timers_share_is_nothing_without_marks_and_something_with_them():
    assert timer_share({"actor": {"step": 1.0}}, 0.0) == 0.0
    assert timer_share({"actor": {"step": 1.0}}, 1000.0) > 0.0


def test_every_agents_training_cost_is_measured_by_its_own_trainer():
    env = env_spec()
    for sections in (
        {},
        {"layout": "sync", "agent": {"name": "ppo", "epochs": 2, "minibatches": 1}},
        {
            "layout": "replay",
            "agent": {"name": "r2d2", "burn_in_steps": 1, "num_steps": 1},
            "network": {"core": "lstm", "core_size": 4},
            "learner": {"unroll_steps": 6},
        },
    ):
        assert training_ms(config_of(**sections), env, 1, 0.01) > 0


def test_a_random_batch_has_the_rows_that_a_learner_gets():
    brain = brain_of(env_spec())
    batch = random_batch(config_of(), env_spec(), brain, 3)
    assert batch.reward.shape == (4, 3)
    assert batch.observation["obs"].shape == (4, 3, 3)
