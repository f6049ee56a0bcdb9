"""Whole jobs of every layout in one process: what environments give is what learners get."""

import numpy as np
import pytest

from hpcrl.comm.loopback import LoopbackPlane
from hpcrl.exit_codes import DONE
from hpcrl.learning.optim import Optimizer
from hpcrl.run.metrics import read_metrics
from tests.loopback_job import JobRun, history_of, left_over
from tests.small import config_of

UNROLL_STEPS = 5


def worker_config(run_dir, learners=1, workers=3, options=None, **sections):
    """Workers with four environments in two groups."""
    base: dict = {
        "layout": "impala",
        "run": {"dir": str(run_dir)},
        "env": {
            "name": "synthetic:counting",
            "envs_per_actor": 4,
            "groups": 2,
            "options": {"episode_length": 3, "length_spread": 4, **(options or {})},
        },
        "topology": {"learners": learners, "inference": "auto", "actors": workers},
        "learner": {"batch_unrolls": 4, "unroll_steps": UNROLL_STEPS, "backend": "mpi"},
        "stop": {"agent_steps": 400},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return config_of(**base)


def size_of(config):
    topology = config.topology
    inference = 0 if topology.inference == "auto" else topology.inference
    return topology.learners + inference + topology.actors


def run_job(monkeypatch, config, **hooks):
    run = JobRun(monkeypatch, **hooks).start(config, size_of(config))
    assert run.codes == [DONE] * size_of(config)
    return run


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"truncate": True}, {"truncate": True, "episode_length": 1, "length_spread": 1}],
    ids=["terminating", "truncating", "one_step_episodes"],
)
def test_workers_send_every_transition_once_and_in_order(tmp_path, monkeypatch, learners, options):
    run = run_job(monkeypatch, worker_config(tmp_path / "run", learners, options=options))
    env_ids = sorted({int(unroll["env_id"]) for unroll in run.all_unrolls})
    assert env_ids == list(range(12))
    for env_id in env_ids:
        unrolls = run.of_environment(env_id)
        history_of(run, unrolls[0]).check(unrolls, UNROLL_STEPS)
    assert len(run.unrolls) == learners
    versions = np.stack([unroll["policy_version"] for unroll in run.all_unrolls])
    assert versions.min() >= 0
    assert versions.max() > 0
    assert (np.diff(versions, axis=1) >= 0).all()
    assert left_over(run.world, "steps", "unrolls", "control") == []


def test_a_lone_worker_takes_weights_only_where_an_unroll_ends(tmp_path, monkeypatch):
    config = worker_config(
        tmp_path / "run",
        workers=1,
        options={"length_spread": 0},
        env={"envs_per_actor": 4, "groups": 1},
    )
    run = run_job(monkeypatch, config)
    versions = np.stack([unroll["policy_version"] for unroll in run.all_unrolls])
    # Row T, where one unroll ends, is row 0 of the next: only behind it may versions change.
    assert (versions[:, 1:] == versions[:, 1:2]).all()
    assert len(np.unique(versions)) > 1


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_frozen_weights_give_impala_and_seed_the_same_unrolls_bit_for_bit(
    tmp_path, monkeypatch, core
):
    monkeypatch.setattr(Optimizer, "step", lambda self, agent_steps: 0.0)
    jobs = {}
    for layout, inference in (("seed", 1), ("impala", "auto")):
        config = worker_config(
            tmp_path / layout,
            workers=1,
            layout=layout,
            options={"truncate": True, "observation_shape": (2,), "observation_dtype": "float32"},
            topology={"inference": inference},
            env={"envs_per_actor": 1, "groups": 1},
            network={"core": core, "core_size": 4, "use_previous_action": True},
            learner={"batch_unrolls": 2},
            stop={"agent_steps": 120},
        )
        jobs[layout] = run_job(monkeypatch, config).all_unrolls
    assert len(jobs["seed"]) == len(jobs["impala"]) >= 24
    for ours, theirs in zip(jobs["seed"], jobs["impala"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"policy_version"}:  # how far learning is when it is sampled
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    # The actions are those of a policy, not a constant.
    assert len({unroll["action"].tobytes() for unroll in jobs["seed"]}) > 2


def test_metrics_of_workers_hold_their_shares_of_time(tmp_path, monkeypatch):
    config = worker_config(tmp_path / "run", stop={"agent_steps": 2000})
    run_job(monkeypatch, config)
    record = read_metrics(tmp_path / "run")[-1]
    assert record["env_steps_per_s"] > 0
    shares = [v for k, v in record.items() if k.startswith(("actor_", "inference_"))]
    assert all(share >= 0 for share in shares)
    assert record["actor_step_share"] > 0
    assert record["inference_forward_share"] > 0


SEED_TOPOLOGY = {"learners": 2, "inference": 2, "actors": 4}
LAYOUTS: dict[str, dict] = {
    "seed": {"topology": SEED_TOPOLOGY},
    "impala": {},
    "async_gradient": {"agent": {"name": "a3c"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_longer_run_makes_no_more_sends_and_receives(tmp_path, monkeypatch, layout):
    made: list[str] = []
    for name in ("sender", "receivers"):
        healthy = getattr(LoopbackPlane, name)

        def noted(self, *arguments, _make=healthy, _name=name, **options):
            made.append(_name)
            return _make(self, *arguments, **options)

        monkeypatch.setattr(LoopbackPlane, name, noted)
    counts = []
    for goal in (100, 2000):
        made.clear()
        stop = {"agent_steps": goal}
        run_dir = tmp_path / str(goal)
        run_job(monkeypatch, worker_config(run_dir, layout=layout, stop=stop, **LAYOUTS[layout]))
        counts.append((made.count("sender"), made.count("receivers")))
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0
