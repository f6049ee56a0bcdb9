"""`learner.max_policy_lag` in whole jobs: too old unrolls are dropped, or never come to be."""

import itertools
import re
import signal
import threading
import time

import numpy as np
import pytest

from hpcrl.config.load import ConfigError
from hpcrl.exit_codes import DONE, REQUEUE, USAGE
from hpcrl.layouts import check_layout
from hpcrl.run.metrics import read_metrics
from hpcrl.run.run_dir import RunDir
from hpcrl.start.demand import check_shares
from hpcrl.topology import plan_topology, uniform_node_map
from tests.loopback_job import JobRun, history_of, left_over
from tests.small import config_of

UNROLL_STEPS = 5


def bounded_config(run_dir, layout="impala", learners=1, acting=2, **sections):
    """Four environments per acting rank: more than a batch, so that unrolls are old by nature."""
    central = layout == "seed"
    base: dict = {
        "layout": layout,
        "run": {"dir": str(run_dir)},
        "env": {
            "name": "synthetic:counting",
            "envs_per_actor": 4,
            "groups": 2,
            "options": {"episode_length": 3, "length_spread": 4, "truncate": True},
        },
        "topology": {
            "learners": learners,
            "inference": learners if central else "auto",
            "actors": acting,
        },
        "learner": {
            "batch_unrolls": 2,
            "unroll_steps": UNROLL_STEPS,
            "backend": "mpi",
            "queue_unrolls": 12,
        },
        "stop": {"agent_steps": 400},
        "transport": {"deadline_s": 20.0},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return config_of(**base)


def size_of(config):
    topology = config.topology
    inference = 0 if topology.inference == "auto" else topology.inference
    return topology.learners + inference + topology.actors


def random_delays(slow_first):
    """Environments that take their time at random, and the first of them always."""
    random, lock = np.random.default_rng(0), threading.Lock()
    slow: list = []

    def delay(envs):
        with lock:
            if not slow:
                slow.append(envs)
            pause_s = random.exponential(0.002) * (random.random() < 0.3)
        time.sleep(pause_s + (0.01 if slow_first and envs is slow[0] else 0.0))

    return delay


def lags_of(run, config):
    """How old the oldest acting row of each unroll was when it was trained on."""
    share = config.learner.batch_unrolls // config.topology.learners
    lags = []
    for unrolls in run.unrolls.values():
        for index, unroll in enumerate(unrolls):
            acting = ~unroll["final"][:-1]
            versions = unroll["policy_version"][:-1][acting]
            lags.append(index // share - versions.min(initial=index // share))
    return lags


@pytest.mark.parametrize("layout", ["seed", "impala"])
@pytest.mark.parametrize("learners", [1, 2])
def test_what_is_too_old_is_dropped_and_counted(tmp_path, monkeypatch, layout, learners):
    config = bounded_config(
        tmp_path / "run",
        layout,
        learners,
        acting=2 * learners,
        learner={"batch_unrolls": 2 * learners, "max_policy_lag": 1},
    )
    run = JobRun(monkeypatch, before_step=random_delays(slow_first=False))
    run.start(config, size_of(config))
    assert set(run.codes) == {DONE}
    assert max(lags_of(run, config)) <= 1
    records = read_metrics(tmp_path / "run")
    assert all(record["policy_lag_max"] <= 1 for record in records)
    dropped = [record["stale_unrolls_dropped"] for record in records]
    assert dropped == sorted(dropped)
    # What is missing between an environment's unrolls was dropped; the rest of its end is unknown.
    gaps = 0
    for env_id in range(8 * learners):
        indices = [int(unroll["unroll_index"]) for unroll in run.of_environment(env_id)]
        assert indices == sorted(set(indices))
        gaps += indices[-1] + 1 - len(indices) if indices else 0
    assert 0 < gaps <= dropped[-1]
    status = RunDir(tmp_path / "run").read_status()
    assert status["counters"]["stale_unrolls_dropped"] == dropped[-1]


@pytest.mark.parametrize("slow_first", [False, True], ids=["random", "one_slow"])
@pytest.mark.parametrize("layout", ["seed", "impala"])
@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("bound", [1, 3])
def test_acting_waits_so_that_nothing_gets_too_old_and_nothing_stops(
    tmp_path, monkeypatch, layout, learners, bound, slow_first
):
    # Of two workers each gives half a batch; an inference rank gives all of it.
    batch = (8 if bound == 1 else 4) * learners
    config = bounded_config(
        tmp_path / "run",
        layout,
        learners,
        acting=2 * learners,
        learner={
            "batch_unrolls": batch,
            "max_policy_lag": bound,
            "stale_unrolls": "wait",
            "queue_unrolls": batch,
        },
    )
    run = JobRun(monkeypatch, before_step=random_delays(slow_first))
    run.start(config, size_of(config))
    assert set(run.codes) == {DONE}
    lags = lags_of(run, config)
    assert 0 < max(lags) <= bound
    record = read_metrics(tmp_path / "run")[-1]
    assert record["stale_unrolls_dropped"] == 0
    assert record["inference_held_share"] >= 0
    for env_id in range(8 * learners):
        unrolls = run.of_environment(env_id)
        for before, after in itertools.pairwise(unrolls):
            assert after["unroll_index"] == before["unroll_index"] + 1
    assert left_over(run.world, "steps", "unrolls", "control") == []


def test_unrolls_join_where_an_environment_did_not_have_to_wait(tmp_path, monkeypatch):
    """With no reason to wait, rows are those of a job without a bound."""
    config = bounded_config(
        tmp_path / "run",
        learner={"batch_unrolls": 4, "max_policy_lag": 100, "stale_unrolls": "wait"},
        env={"options": {"episode_length": 3, "length_spread": 4}},
    )
    run = JobRun(monkeypatch).start(config, size_of(config))
    for env_id in range(8):
        unrolls = run.of_environment(env_id)
        if unrolls:
            history_of(run, unrolls[0]).check(unrolls, UNROLL_STEPS)


@pytest.mark.parametrize("stale", ["drop", "wait"])
def test_a_resumed_run_keeps_to_the_bound_and_goes_on_counting(tmp_path, monkeypatch, stale):
    sections = {"learner": {"batch_unrolls": 4, "max_policy_lag": 1, "stale_unrolls": stale}}
    sections["learner"]["queue_unrolls"] = 24 if stale == "drop" else 8

    def stop(run):
        if sum(map(len, run.unrolls.values())) == 80:
            run.signal(signal.SIGTERM)

    config = bounded_config(tmp_path / "run", acting=2, **sections)
    first = JobRun(monkeypatch, after_batch=stop).start(config, size_of(config))
    assert set(first.codes) == {REQUEUE}
    before = RunDir(tmp_path / "run").read_status()["counters"]
    again = bounded_config(tmp_path / "run", acting=2, **sections, stop={"agent_steps": 800})
    second = JobRun(monkeypatch).start(again, size_of(again))
    assert set(second.codes) == {DONE}
    steps = before["learner_steps"]
    versions = [int(unroll["policy_version"].min()) for unroll in second.all_unrolls]
    assert min(versions) == steps
    assert max(i // 4 + steps - version for i, version in enumerate(versions)) <= 1
    after = RunDir(tmp_path / "run").read_status()["counters"]
    assert after["stale_unrolls_dropped"] >= before["stale_unrolls_dropped"]
    assert all(record["policy_lag_max"] <= 1 for record in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"layout": "impala", "learner": {"max_policy_lag": 0}},
            "learner.max_policy_lag 0 in layout: impala, where workers act and learners correct "
            "for the lag: while a learner step is computed nothing could be acted",
        ),
        ({"layout": "seed", "learner": {"max_policy_lag": 0}}, "that is layout: sync. Set it to"),
        (
            {"layout": "seed", "learner": {"stale_unrolls": "wait"}},
            "learner.max_policy_lag is none: set it",
        ),
        (
            {"layout": "replay", "agent": {"name": "apex"}, "learner": {"max_policy_lag": 3}},
            "learner.max_policy_lag 3 bounds nothing in layout: replay",
        ),
    ],
    ids=["zero_impala", "zero_seed", "no_bound", "replay"],
)
def test_a_bound_that_makes_no_sense_is_refused_with_the_reason(sections, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_layout(config_of(**sections))


def test_zero_lag_is_what_a_synchronous_layout_has_anyway():
    check_layout(config_of(layout="sync", agent={"name": "ppo"}, learner={"max_policy_lag": 0}))


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (
            {"batch_unrolls": 4, "max_policy_lag": 1},
            "rank 1 gives learner 0 1 unrolls of each batch (learner.batch_unrolls 4, shared by "
            "learners and acting ranks) and may begin 1 x (learner.max_policy_lag 1 + 1) = 2 ahead "
            "of the weights, fewer than its 1 x env.envs_per_actor 4 = 4 environments",
        ),
        (
            {"batch_unrolls": 3, "max_policy_lag": 9},
            "rank 1 gives learner 0 0 unrolls of each batch",
        ),
    ],
    ids=["environments", "share"],
)
def test_a_bound_under_which_environments_wait_for_ever_is_refused_with_the_inequality(
    learner, message
):
    config = config_of(
        layout="impala",
        topology={"learners": 1, "inference": "auto", "actors": 4},
        env={"envs_per_actor": 4},
        learner={**learner, "stale_unrolls": "wait"},
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_shares(config, _topology(config))


def test_a_queue_that_never_holds_the_share_of_a_rank_is_refused_with_the_inequality():
    """Ranks of 3 and 2 actors give 8 x 3 / 5 and the rest; equal slots are too few for one."""
    config = config_of(
        layout="seed",
        topology={"learners": 1, "inference": 2, "actors": 5},
        env={"envs_per_actor": 2},
        learner={
            "batch_unrolls": 10,
            "max_policy_lag": 3,
            "stale_unrolls": "wait",
            "queue_unrolls": 10,
        },
    )
    with pytest.raises(ConfigError, match=r"finds 5 free slots .* 5 < 6, a batch would never"):
        check_shares(config, _topology(config))


def _topology(config):
    from hpcrl.start.demand import demand_of

    counts = config.topology
    inference = 0 if counts.inference == "auto" else counts.inference
    return plan_topology(
        counts,
        uniform_node_map(1, counts.learners + inference + counts.actors),
        demand_of(config),
        {},
    )


def test_a_refused_bound_ends_every_rank_with_code_2(tmp_path, monkeypatch, capfd):
    config = bounded_config(
        tmp_path / "run", learner={"max_policy_lag": 1, "stale_unrolls": "wait"}
    )
    run = JobRun(monkeypatch).start(config, size_of(config))
    assert set(run.codes) == {USAGE}
    assert "may begin 1 x (learner.max_policy_lag 1 + 1) = 2" in capfd.readouterr().err
