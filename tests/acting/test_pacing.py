"""Synchronous jobs: every environment gives each version its share, and nothing else is learned."""

import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from hpcrl.acting.policy import Policy
from hpcrl.brain import Brain
from hpcrl.exit_codes import DONE, USAGE
from hpcrl.learning.optim import FlatParameters, Optimizer
from hpcrl.run.metrics import read_metrics
from hpcrl.types import NetInputs
from tests.loopback_job import JobRun, left_over
from tests.small import config_of, env_spec

UNROLL_STEPS = 5


def sync_config(run_dir, placement="central", learners=1, acting=2, **sections):
    """Four environments per acting rank in two groups, one unroll of each per version."""
    base: dict = {
        "layout": "sync",
        "placement": placement,
        "run": {"dir": str(run_dir)},
        "env": {
            "name": "synthetic:counting",
            "envs_per_actor": 4,
            "groups": 2,
            "options": {
                "episode_length": 3,
                "length_spread": 4,
                "observation_shape": (2,),
                "observation_dtype": "float32",
            },
        },
        "topology": {
            "learners": learners,
            "inference": 1 if placement == "central" else "auto",
            "actors": acting,
        },
        "agent": {"name": "ppo", "epochs": 2, "minibatches": 2},
        "learner": {
            "batch_unrolls": 4 * acting,
            "unroll_steps": UNROLL_STEPS,
            "backend": "mpi",
        },
        "stop": {"agent_steps": 400},
        "transport": {"deadline_s": 20.0},
    }
    if placement == "central" and learners > 1:
        base["topology"]["inference"] = learners
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return config_of(**base)


def size_of(config):
    topology = config.topology
    inference = 0 if topology.inference == "auto" else topology.inference
    return topology.learners + inference + topology.actors


def run_job(monkeypatch, config, **hooks):
    run = JobRun(monkeypatch, **hooks).start(config, size_of(config))
    assert run.codes == [DONE] * size_of(config)
    return run


@pytest.mark.parametrize("placement", ["central", "local"])
@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("truncate", [False, True], ids=["terminating", "truncating"])
def test_lag_is_zero_on_every_row_under_random_delays_of_the_environments(
    tmp_path, monkeypatch, placement, learners, truncate
):
    random, lock = np.random.default_rng(0), threading.Lock()

    def delay(envs):
        with lock:
            pause_s = random.exponential(0.002) * (random.random() < 0.3)
        time.sleep(pause_s)

    config = sync_config(tmp_path / "run", placement, learners)
    options = {**config.env.options, "truncate": truncate}
    config = sync_config(tmp_path / "run", placement, learners, env={"options": options})
    run = run_job(monkeypatch, config, before_step=delay)
    share = 8 // learners
    for unrolls in run.unrolls.values():
        for version, first in enumerate(range(0, len(unrolls), share)):
            batch = unrolls[first : first + share]
            # One unroll of each environment, all acting rows of one version: that of this step.
            assert len({int(unroll["env_id"]) for unroll in batch}) == share
            for unroll in batch:
                acting = ~unroll["final"][:-1]
                assert (unroll["policy_version"][:-1][acting] == version).all()
    records = read_metrics(tmp_path / "run")
    assert records
    assert all(record["policy_lag_max"] == 0 == record["policy_lag"] for record in records)
    assert left_over(run.world, "steps", "unrolls", "control") == []


@pytest.mark.parametrize("placement", ["central", "local"])
def test_one_slow_rank_holds_the_others_up_but_nothing_stops(tmp_path, monkeypatch, placement):
    slow: list = []

    def delay(envs):
        if not slow:
            slow.append(envs)
        if envs is slow[0]:
            time.sleep(0.01)

    run = run_job(monkeypatch, sync_config(tmp_path / "run", placement), before_step=delay)
    counts = Counter(int(unroll["env_id"]) for unroll in run.all_unrolls)
    assert len(set(counts.values())) == 1
    assert counts.total() >= 80


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_unrolls_join_without_a_gap_and_their_first_action_is_of_the_new_weights(
    tmp_path, monkeypatch, core
):
    weights: dict[int, np.ndarray] = {}
    load = Policy.load

    def noted(self, parameters, version):
        weights[version] = parameters.copy()
        load(self, parameters, version)

    monkeypatch.setattr(Policy, "load", noted)
    sections = {
        "env": {"groups": 1},
        "network": {"core": core, "core_size": 4, "use_previous_action": True},
        "agent": {"minibatch_over": "unrolls"},
        "learner": {"optimizer": {"learning_rate": 0.05}},
    }
    run = run_job(monkeypatch, sync_config(tmp_path / "run", acting=1, **sections))
    assert len(weights) > 5
    for env_id in range(4):
        unrolls = run.of_environment(env_id)
        for before, after in itertools.pairwise(unrolls):
            for name in ("obs:obs", "reward", "terminated", "start", "previous_action"):
                np.testing.assert_array_equal(before[name][-1], after[name][0])
            # The action of the shared row was chosen anew.
            assert after["policy_version"][0] == before["policy_version"][0] + 1
            np.testing.assert_array_equal(after["previous_action"][1], after["action"][0])
        for unroll in unrolls:
            check_behaviour(run, unroll, weights, sections, tmp_path)


def check_behaviour(run, unroll, weights, sections, tmp_path):
    """Recompute what acting recorded, with the version that the rows name."""
    config = sync_config(tmp_path / "oracle", acting=1, **sections)
    env = env_spec("synthetic:counting", **config.env.options)
    brain = Brain(config, env)
    network = brain.make_network(0)
    flat = FlatParameters(network)
    flat.value.copy_(torch.from_numpy(weights[int(unroll["policy_version"][0])]))

    def rows(name):
        return torch.from_numpy(unroll[name][:-1, None].copy())

    inputs = NetInputs(
        {"obs": rows("obs:obs")}, rows("reward"), rows("previous_action"), rows("start")
    )
    with torch.no_grad():
        outputs, _ = network(inputs, torch.from_numpy(unroll["core_state"][None].copy()))
        log_prob = brain.distribution.log_prob(outputs.policy, rows("action"))
    np.testing.assert_allclose(log_prob[:, 0], unroll["behaviour:log_prob"][:-1], atol=1e-5)
    np.testing.assert_allclose(outputs.value[:, 0], unroll["behaviour:value"][:-1], atol=1e-5)


def test_central_and_local_acting_learn_alike(tmp_path, monkeypatch):
    """One environment: the same stream of random numbers, the same weights after training."""
    finals = {}
    step = Optimizer.step
    for placement in ("central", "local"):
        norms: list[float] = []

        def noted(self, agent_steps, norms=norms):
            norms.append(float(step(self, agent_steps)))
            return norms[-1]

        monkeypatch.setattr(Optimizer, "step", noted)
        config = sync_config(
            tmp_path / placement,
            placement,
            acting=1,
            env={"envs_per_actor": 1, "groups": 1},
            learner={"batch_unrolls": 2},
            stop={"agent_steps": 100},
        )
        run_job(monkeypatch, config)
        finals[placement] = norms
    assert len(finals["central"]) == 40
    assert finals["central"] == finals["local"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learner": {"batch_unrolls": 10}}, "batch_unrolls 10 is not a multiple of them: set it"),
        ({"learner": {"batch_unrolls": 4}}, "set it to 8"),
        ({"agent": {"minibatches": 50}}, "agent.minibatches 50"),
        ({"topology": {"learners": 2, "inference": 2, "actors": 3}}, "got [8, 4]"),
    ],
)
def test_a_batch_that_environments_cannot_share_is_refused(
    tmp_path, monkeypatch, capfd, sections, message
):
    config = sync_config(tmp_path / "run", **sections)
    run = JobRun(monkeypatch).start(config, size_of(config))
    assert set(run.codes) == {USAGE}
    assert message in capfd.readouterr().err
