"""No rank of a job imports what its role does not use: 32 starts on a node are 32 imports."""

import json

import pytest
import yaml

from tests.mpi_runner import run_mpi
from tests.small import BASE, merged

NOT_FOR_ACTING = {"horovod", "h5py", "tensorboard", "matplotlib", "pandas", "scipy", "PIL", "cv2"}
NOT_FOR_ACTORS = NOT_FOR_ACTING | {"torch", "sympy", "mujoco"}


def top_levels(folder, rank):
    return {name.partition(".")[0] for name in (folder / str(rank)).read_text().splitlines()}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("seed", ["learner", "inference", "actor", "evaluator"]),
        ("impala", ["learner", "worker"]),
    ],
)
def test_a_rank_imports_what_its_role_uses(tmp_path, layout, roles):
    counts = {"seed": {"inference": 1, "evaluators": 1}, "impala": {"inference": "auto"}}
    sections = {"layout": layout, "topology": counts[layout], "learner": {"backend": "auto"}}
    config = tmp_path / "c.yaml"
    run = tmp_path / "run"
    config.write_text(yaml.safe_dump(merged(BASE, {**sections, "run": {"dir": str(run)}})))
    run_mpi("modules_of_ranks.py", len(roles), [str(tmp_path), str(config)], 90.0)
    played = [rank["role"] for rank in json.loads((run / "topology.json").read_text())["ranks"]]
    assert sorted(played) == sorted(roles)
    for rank, role in enumerate(played):
        loaded = top_levels(tmp_path, rank)
        assert "mpi4py" in loaded
        if role == "actor":
            assert not loaded & NOT_FOR_ACTORS, role
        elif role == "learner":
            # A single learner sums with nobody; learner 0 alone draws the picture at the end.
            assert not loaded & {"horovod", "h5py", "scipy", "pandas", "cv2"}, role
        else:
            assert "torch" in loaded
            assert not loaded & NOT_FOR_ACTING, role
