"""benchmarks/gpu_check.py from end to end, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "env": {"envs_per_actor": 4, "groups": 2},
    "network": {"torso": "nature_cnn", "hidden_sizes": [16]},
    "learner": {"batch_unrolls": 4, "unroll_steps": 4},
    "topology": {"learners": 1, "inference": 1, "actors": 1},
}


def run(tmp_path, *options):
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(SMALL))
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), str(config), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False
    )


@pytest.mark.mpi
@pytest.mark.slow
def test_the_check_runs_from_end_to_end_without_a_gpu(tmp_path):
    file = tmp_path / "r.json"
    done = run(tmp_path, "--device", "cpu", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["agrees"]
    # float32 on the CPU is the reference itself.
    assert found["agreement"]["acting"]["policy_float32"]["relative"] == 0.0
    assert found["agreement"]["acting"]["policy_bfloat16"]["relative"] > 0.0
    assert found["agreement"]["acting"]["buckets"]["relative"] < 1e-5
    assert found["agreement"]["training"]["float32, 1 parts"]["loss_relative"] == 0.0
    assert found["jobs"]["one learner, float32"]["env_steps_per_s"] > 0
    assert {job["exit_code"] for job in found["jobs"].values()} == {0}
    assert set(found["stage_costs"]) == {"act_batch_s", "act_row_s", "train_s", "weights_s"}


def test_without_a_gpu_it_says_how_to_run_without_one(tmp_path):
    import torch

    if torch.cuda.is_available():
        return
    done = run(tmp_path)
    assert done.returncode == 2
    assert "--device cpu" in done.stderr
