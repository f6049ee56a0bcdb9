"""Which combinations of layout, placement and agent are allowed, and what is said of the others."""

import itertools
import re

import pytest

from hpcrl.agents import AGENTS, REPLAY_AGENTS
from hpcrl.job import max_gradient_lag
from hpcrl.layouts import LAYOUTS, check_layout, placement_of
from hpcrl.topology import RoleDemand, TopologyConfig, plan_topology, uniform_node_map
from tests.small import config_of


def config(layout, agent, placement="auto", **sections):
    return config_of(layout=layout, placement=placement, agent={"name": agent}, **sections)


def test_exactly_the_listed_combinations_are_allowed():
    allowed = set()
    for layout, placement, agent in itertools.product(LAYOUTS, ("central", "local"), AGENTS):
        try:
            check_layout(config(layout, agent, placement))
        except ValueError:
            continue
        allowed.add((layout, placement, agent))
    assert allowed == {
        ("seed", "central", "vtrace"),
        ("impala", "local", "vtrace"),
        ("sync", "central", "ppo"),
        ("sync", "local", "ppo"),
        ("async_gradient", "local", "a3c"),
        ("replay", "central", "r2d2"),
        ("replay", "central", "apex"),
        ("replay", "local", "r2d2"),
        ("replay", "local", "apex"),
    }


def test_every_layout_has_a_placement_of_its_own():
    agents = {layout: rules.agents[0] for layout, rules in LAYOUTS.items()}
    placements = {layout: placement_of(config(layout, agents[layout])) for layout in LAYOUTS}
    assert placements == {
        "seed": "central",
        "impala": "local",
        "sync": "central",
        "async_gradient": "local",
        "replay": "central",
    }


@pytest.mark.parametrize("agent", REPLAY_AGENTS)
def test_a_replay_agent_elsewhere_is_refused_with_the_layout_that_it_needs(agent):
    with pytest.raises(ValueError, match=re.escape(f"agent.name {agent} learns in layout: replay")):
        check_layout(config("impala", agent))


def test_a_placement_that_the_layout_does_not_have_is_refused_with_the_one_it_has():
    with pytest.raises(ValueError, match="placement central does not go with layout: impala, "):
        check_layout(config("impala", "vtrace", "central"))


def test_shuffled_transitions_of_a_recurrent_network_are_refused():
    with pytest.raises(
        ValueError, match=r"network\.core lstm needs agent\.minibatch_over: unrolls"
    ):
        check_layout(config("sync", "ppo", network={"core": "lstm"}))
    agent = {"name": "ppo", "minibatch_over": "unrolls"}
    check_layout(config_of(layout="sync", agent=agent, network={"core": "lstm"}))


def asynchronous(**sections):
    return config_of(layout="async_gradient", agent={"name": "a3c"}, **sections)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learner": {"max_gradient_lag": 0}}, r"max_gradient_lag is 0: .* give at least 1, or"),
        (
            {"learner": {"batch_unrolls": 7}, "env": {"envs_per_actor": 3, "groups": 1}},
            r"batch_unrolls 7 is not a multiple of them: set it to 6 or 9",
        ),
        (
            {"learner": {"batch_unrolls": 2}, "env": {"envs_per_actor": 4, "groups": 1}},
            r"batch_unrolls 2 is not a multiple of them: set it to 4",
        ),
        ({"learner": {"micro_batches": 5}}, r"micro_batches 5 is more than learner\.batch_unrolls"),
        ({"learner": {"precision": "float16"}}, r"precision float16 needs a loss scale that all"),
        ({"topology": {"evaluators": 1}}, r"topology\.evaluators 1: an evaluator asks one learner"),
    ],
    ids=["lag_bound_zero", "batch", "small_batch", "micro_batches", "float16", "evaluators"],
)
def test_what_asynchronous_gradients_cannot_have_is_refused_with_the_reason(sections, message):
    with pytest.raises(ValueError, match=message):
        check_layout(asynchronous(**sections))


@pytest.mark.parametrize("agent", [*REPLAY_AGENTS, "vtrace", "ppo"])
def test_only_an_agent_of_gradients_learns_in_async_gradient(agent):
    message = f"agent.name {agent} learns in layout: .*whose agents are a3c"
    with pytest.raises(ValueError, match=message):
        check_layout(config("async_gradient", agent))


def test_a_recurrent_network_may_send_asynchronous_gradients():
    check_layout(asynchronous(network={"core": "lstm"}))


def test_a_bound_of_the_gradient_lag_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="max_gradient_lag 5 has no meaning in layout: impala"):
        check_layout(config_of(layout="impala", learner={"max_gradient_lag": 5}))


def test_the_bound_is_four_times_the_workers_unless_it_is_given():
    topology = plan_topology(
        TopologyConfig(learners=2), uniform_node_map(1, 7), RoleDemand("local", sharded=True)
    )
    assert max_gradient_lag(asynchronous(), topology) == 20
    assert max_gradient_lag(asynchronous(learner={"max_gradient_lag": 3}), topology) == 3
