"""The benchmarks that start ranks of their own, each as short as it can be."""

import sys

import psutil
import pytest

from hpcrl.bench import checkpoint, inference, learner, ranks, wire
from hpcrl.config.load import load_config, parse_config


@pytest.mark.mpi
def test_wire_measures_both_ways_with_the_same_bytes():
    program = [str(ranks.benchmark_script("wire_ranks.py"))]
    cases = [[64, 1], list(wire.GOAL_CASE)]
    arguments = {"cases": cases, "seconds": 0.05, "rounds": 1, "wait": "auto", "cores": 1}
    found = ranks.run_ranks(program, 3, arguments, 90.0)["cases"]
    assert [case["clients"] for case in found] == [2, 2]
    assert found[1]["message_bytes"] == pytest.approx(28_224 * 8, rel=0.01)
    assert found[1]["wait"] == "backoff"
    for case in found:
        for way in ("hpcrl", "hpcrl_with_copies", "raw"):
            assert case[way]["steps_per_s"] > 0
            assert 0 < case[way]["p10_us"] <= case[way]["p50_us"] <= case[way]["p99_us"]


def case(clients, row_bytes, rows, ratio):
    quantiles = {"steps_per_s": 1.0, "p10_us": 1.0, "p50_us": 2.0, "p99_us": 3.0}
    return {
        **{"clients": clients, "row_bytes": row_bytes, "rows": rows, "wait": "yield"},
        **{"message_bytes": row_bytes * rows, "ratio": ratio, "ratio_with_copies": 2 * ratio},
        **{way: quantiles for way in ("hpcrl", "hpcrl_with_copies", "raw")},
    }


def test_wires_headline_is_the_case_of_the_goal_with_one_client():
    cases = [case(1, 64, 1, 9.0), case(1, 28_224, 8, 1.1), case(4, 28_224, 8, 5.0)]
    found = wire.summarise(cases)
    assert (found.ratio, found.figures["ratio_with_copies"]) == (1.1, 2.2)
    assert len(found.sheets[0].rows) == 3


@pytest.mark.mpi
def test_inference_counts_what_its_actors_send():
    found = inference.bench_inference(
        "configs/counting.yaml", ["--env.envs_per_actor", "4", "--env.groups", "2"], 2, 0.5
    )
    figures = found.figures
    assert set(figures["batch_rows_histogram"]) <= {"2", "4", "6", "8"}
    assert found.ratio == pytest.approx(figures["rows_per_s"] / figures["bare_rows_per_s"])
    assert sum(figures["stages"].values()) == pytest.approx(1.0)
    assert figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"]


def test_a_program_that_takes_too_long_is_ended_with_its_children():
    sleep = "import time; time.sleep(77)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    with pytest.raises(ranks.BenchError, match="took over 1 s"):
        ranks.run_to_end([sys.executable, "-c", program], 1.0)
    assert not any(sleep in part for p in psutil.process_iter() for part in _command(p))


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.mpi
def test_ranks_that_fail_are_an_error_with_their_code(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    with pytest.raises(ranks.BenchError, match="ended with code"):
        ranks.run_ranks([str(script)], 1, {}, 60.0)


@pytest.mark.mpi
def test_learner_steps_sums_and_stalls_are_measured():
    found = learner.bench_learner("configs/counting.yaml", [], 1.5, 2, 2)
    figures = found.figures
    assert found.ratio == pytest.approx(figures["steps_per_s"] / figures["bare_steps_per_s"])
    assert figures["backend"] == "single"
    assert figures["checkpoints"] > 0
    assert 0 < figures["publish_share"] < 1
    assert [(c["values"], c["learners"]) for c in figures["all_reduce"]] == [
        (10_000, 2),
        (1_700_000, 2),
    ]
    assert {"mpi_library", "mpi", "torch"} <= set(figures["all_reduce"][0]["ms"])
    assert figures["all_reduce_over_library"]["mpi_library"] == 1.0


@pytest.mark.mpi
@pytest.mark.parametrize("agent", ["ppo", "r2d2"])
def test_the_learner_of_every_agent_is_measured(agent):
    kinds = {"ppo": "configs/cartpole_ppo.yaml", "r2d2": "configs/memory_r2d2.yaml"}
    found = learner.flood_learner(load_config(kinds[agent], []), 3.0)["learners"][0]
    assert found["agent"] == agent
    assert found["ratio"] == pytest.approx(found["steps_per_s"] / found["bare_steps_per_s"])
    assert 0 < found["ratio"] < 3


def test_a_flooded_learner_keeps_its_agent_and_has_one_client():
    for name, layout in (
        ("cartpole_vtrace", "impala"),
        ("cartpole_impala", "impala"),
        ("cartpole_ppo", "sync"),
        ("cartpole_apex", "replay"),
    ):
        config = load_config(f"configs/{name}.yaml", [])
        data = parse_config(learner.flooded(config, 6.0))
        assert (data.layout, data.agent) == (layout, config.agent)
        assert (data.topology.learners, data.topology.actors) == (1, 1)
        assert data.checkpoint.every_s == 1.0


def test_a_checkpoints_headline_is_its_stall_in_steps():
    learned = {
        **{"checkpoint_stall_steps": 0.25, "publish_share": 0.01, "step_ms": 40.0},
        **{"checkpoints": 3, "parameters": 1000, "agent": "vtrace"},
    }
    found = checkpoint.summarise({"learners": [learned], "copies_received": 7})
    assert found.ratio == 0.25
    assert found.figures["stall_ms"] == pytest.approx(10.0)
    with pytest.raises(ranks.BenchError, match="no checkpoint"):
        checkpoint.summarise({"learners": [{**learned, "checkpoint_stall_steps": None}]})
