import json
from dataclasses import asdict, replace

import pytest

from hpcrl.bench import learner, project, stage_costs
from hpcrl.bench.ranks import BenchError
from hpcrl.bench.simulator import Network
from hpcrl.config.load import load_config
from tests.small import config_of

COSTS = stage_costs.StageCosts(
    **dict.fromkeys([*map(str, stage_costs.StageCosts.__dataclass_fields__)], 0.001)
)
MACHINE = project.Machine(4, 4, 0, Network(), {})


def files(tmp_path, costs):
    (tmp_path / "c.yaml").write_text("stop: {agent_steps: 1000}\n")
    (tmp_path / "costs.json").write_text(json.dumps({"stage_costs": costs}))
    return str(tmp_path / "c.yaml"), str(tmp_path / "costs.json")


def test_a_projection_says_rate_batch_lag_and_limit_for_every_number_of_nodes(tmp_path):
    path, costs = files(tmp_path, asdict(COSTS))
    found = project.bench_project(path, [], [2, 1], MACHINE, costs)
    one, two = found.figures["cases"]
    assert (one["nodes"], two["nodes"]) == (1, 2)
    assert two["environments"] == 2 * one["environments"] == 2 * 16
    assert found.ratio == pytest.approx(two["agent_steps_per_s"] / one["agent_steps_per_s"] / 2)
    assert {"batch_rows", "policy_lag", "limit", "busy"} <= one.keys()
    assert one["limit"] in found.meaning or two["limit"] in found.meaning


def test_costs_that_are_incomplete_or_negative_are_refused(tmp_path):
    few = {k: v for k, v in asdict(COSTS).items() if k != "env_s"}
    for costs in (few, {**asdict(COSTS), "env_s": -1.0}, {**asdict(COSTS), "more": 1.0}):
        path, file = files(tmp_path, costs)
        with pytest.raises(BenchError, match=r"env_s|more"):
            project.bench_project(path, [], [1], MACHINE, file)


def test_a_layout_without_a_model_is_refused():
    config = load_config("configs/cartpole_a3c.yaml", [])
    with pytest.raises(BenchError, match="async_gradient"):
        project.topology_of(config, 1, MACHINE)
    with pytest.raises(BenchError, match="async_gradient"):
        learner.flood_learner(config, 1.0)


def test_nodes_with_gpus_need_costs_measured_on_one(tmp_path):
    path, costs = files(tmp_path, asdict(COSTS))
    with pytest.raises(BenchError, match="gpu_check"):
        project.bench_project(path, [], [1], replace(MACHINE, gpus_per_node=2), costs)


def test_gpu_costs_replace_those_of_a_core_and_learners_share_the_batch(tmp_path):
    gpu = dict.fromkeys(("act_batch_s", "act_row_s", "train_s", "weights_s"), 0.5)
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"stage_costs": {**gpu, "other": 1}}))
    machine = replace(MACHINE, gpu_costs=project.read_gpu_costs(str(file)))
    found = project.scaled(COSTS, config_of(), 5, machine)
    assert (found.act_row_s, found.env_s) == (0.5, COSTS.env_s)
    assert found.train_s == pytest.approx(0.1)
    with pytest.raises(BenchError, match="stage costs"):
        project.read_gpu_costs(str(tmp_path / "none.json"))


def test_the_checks_headline_is_the_prediction_that_is_farthest_off():
    figures = {"agent_steps_per_s": 1.0, "batch_rows": 1.0, "policy_lag": 1.0}
    cases = [
        {"actors": n, "ratio": ratio, "real": figures, "predicted": figures}
        for n, ratio in ((1, 1.1), (2, 0.8), (4, 1.15))
    ]
    found = project.check_result(cases)
    assert (found.ratio, found.figures["within"]) == (0.8, False)
    assert project.check_result(cases[::2]).figures["within"]


def test_the_mean_of_costs_is_taken_of_each():
    twice = replace(COSTS, env_s=0.003)
    assert stage_costs.StageCosts.mean([COSTS, twice]).env_s == pytest.approx(0.002)


@pytest.mark.mpi
def test_a_real_run_is_predicted_from_measured_costs(tmp_path):
    config = {
        "env": {
            "name": "synthetic:counting",
            "options": {"step_time_s": 0.02},
            **{"envs_per_actor": 2, "groups": 2},
        },
        "topology": {"learners": 1, "inference": 1},
        "learner": {"batch_unrolls": 2, "unroll_steps": 5},
        "stop": {"agent_steps": 1000},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    found = project.bench_check(str(tmp_path / "c.yaml"), [], [1], 4.0, 1.0, 0.1)
    case = found.figures["cases"][0]
    # Sleeping takes no core, so both are near 50 steps a second whatever else runs here.
    assert case["stage_costs"]["env_sleep_s"] == pytest.approx(0.02, rel=0.5)
    assert 0 < case["predicted"]["agent_steps_per_s"] <= 51
    assert case["ratio"] == pytest.approx(
        case["predicted"]["agent_steps_per_s"] / case["real"]["agent_steps_per_s"]
    )
