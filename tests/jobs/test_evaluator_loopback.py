"""Evaluator ranks in whole jobs of every layout, each rank a thread."""

import json

import numpy as np
import pytest

from analysis.reader import Run
from hpcrl.comm.loopback import World
from hpcrl.comm.rounds import RoundCollector, RoundReporter
from hpcrl.evaluation.whole_episodes import Episode
from hpcrl.exit_codes import DONE
from hpcrl.run.metrics import read_metrics
from tests.loopback_job import JobRun, left_over
from tests.small import config_of

LAYOUTS: dict[str, dict] = {
    "seed": {},
    "impala": {"layout": "impala", "topology": {"inference": "auto", "actors": 2}},
    "sync": {
        "layout": "sync",
        "agent": {"name": "ppo", "minibatches": 1, "epochs": 1},
        "learner": {"batch_unrolls": 4},
        "topology": {"actors": 2},
    },
    "sync_workers": {
        "layout": "sync",
        "placement": "local",
        "agent": {"name": "ppo", "minibatches": 1, "epochs": 1},
        "learner": {"batch_unrolls": 4},
        "topology": {"inference": "auto", "actors": 2},
    },
    "replay": {
        "layout": "replay",
        "agent": {"name": "apex"},
        "replay": {"capacity_unrolls": 64, "min_size_unrolls": 8, "ratio": 0.5},
        "learner": {"unroll_steps": 8, "batch_unrolls": 4},
    },
}


def evaluated(tmp_path, monkeypatch, layout="seed", evaluators=1, learners=1, **sections):
    """A job with evaluators of 3 episodes a round, and its records that hold a round."""
    base: dict = {
        "run": {"dir": str(tmp_path / "run")},
        "env": {"options": {"episode_length": 4, "length_spread": 5}},
        "evaluation": {"episodes": 3, "envs": 2, "every_s": 0},
        "stop": {"agent_steps": 0, "wall_time_s": 2.0},
        **LAYOUTS[layout],
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    topology = {
        "learners": learners,
        "inference": 1,
        "actors": learners,
        **base.get("topology", {}),
    }
    base["topology"] = {**topology, "evaluators": evaluators}
    inference = 0 if topology["inference"] == "auto" else max(1, learners)
    if inference:
        base["topology"]["inference"] = inference
    size = topology["learners"] + inference + topology["actors"] + evaluators
    run = JobRun(monkeypatch)
    run.start(config_of(**base), size)
    assert run.codes == [DONE] * size
    assert left_over(run.world, "steps", "unrolls", "control") == []
    records = read_metrics(tmp_path / "run")
    return run, [record for record in records if "eval/return" in record]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_are_reported_in_every_layout(tmp_path, monkeypatch, layout):
    _, records = evaluated(tmp_path, monkeypatch, layout)
    assert len(records) >= 2
    versions = [record["eval/learner_steps"] for record in records]
    assert versions == sorted(versions)
    assert versions[-1] > 0
    for record in records:
        assert record["eval/episodes"] % 3 == 0
        # Step k of a counting episode gives the reward k.
        assert 10 <= record["eval/return"] <= 45
        assert record["eval/frames"] <= record["frames"]
        assert record["eval/learner_steps"] <= record["learner_steps"]
    status = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert status["eval_return"] == records[-1]["eval/return"]


def test_frames_are_those_of_the_weights_that_played(tmp_path, monkeypatch):
    _, records = evaluated(tmp_path, monkeypatch)
    for record in records:  # 2 unrolls of 3 steps each learner step
        assert record["eval/frames"] == pytest.approx(6 * record["eval/learner_steps"])


def test_evaluators_of_several_learners_report_to_the_root(tmp_path, monkeypatch):
    _, records = evaluated(tmp_path, monkeypatch, evaluators=3, learners=2)
    assert sum(record["eval/episodes"] for record in records) >= 9


def test_a_stop_ends_a_round_that_would_not_end(tmp_path, monkeypatch):
    _, records = evaluated(tmp_path, monkeypatch, evaluation={"episodes": 10**6})
    assert records == []


def test_no_evaluator_reports_nothing(tmp_path, monkeypatch):
    _, records = evaluated(tmp_path, monkeypatch, evaluators=0)
    assert records == []


def test_recorded_evaluation_is_marked_and_apart_from_training(tmp_path, monkeypatch):
    run, records = evaluated(tmp_path, monkeypatch, recording={"enabled": True})
    episodes = Run(tmp_path / "run").episodes()
    marked = episodes[episodes["evaluation"]]
    assert marked["writer"].unique().tolist() == ["evaluator-0-0"]
    assert episodes[~episodes["evaluation"]]["writer"].unique().tolist() == ["inference-0-0"]
    assert set(marked["env_id"]) == {2, 3}
    assert set(marked["env_seed"]).isdisjoint(episodes[~episodes["evaluation"]]["env_seed"])
    assert len({unroll["env_id"].item() for unroll in run.all_unrolls}) == 2
    complete = marked[marked["complete"]]
    assert len(complete) >= sum(record["eval/episodes"] for record in records)
    for env_id, own in marked.groupby("env_id"):
        assert own["episode"].tolist() == list(range(len(own))), env_id
    # All episodes of a round are played by one version.
    assert (marked["first_policy_version"] == marked["last_policy_version"]).all()


def test_rounds_between_two_records_are_pooled():
    world = World(3)
    reporters = [RoundReporter(world.link(rank), 0, 2) for rank in (1, 2)]
    collector = RoundCollector(world.link(0), (1, 2), 2)
    assert collector.take() == {}
    reporters[0].send([Episode(1.0, 5), Episode(2.0, 6)], 10, 100, 1.0)
    reporters[1].send([Episode(3.0, 7), Episode(10.0, 8, True)], 20, 300, 3.0)
    collector.poll()
    assert collector.pending
    assert collector.take() == {
        "eval/return": 4.0,
        "eval/median_return": 2.5,
        "eval/episode_steps": 6.5,
        "eval/episodes": 4.0,
        "eval/cut_off_episodes": 1.0,
        "eval/frames": 200.0,
        "eval/learner_steps": 15.0,
        "eval/seconds": 2.0,
    }
    assert not collector.pending
    assert np.isfinite(list(collector.take().values())).all()
