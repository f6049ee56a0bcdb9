"""Which combinations of layout, placement and agent are allowed, and what is said of the others."""

import itertools
import re

import pytest

from hpcrl.agents import AGENTS, REPLAY_AGENTS
from hpcrl.layouts import LAYOUTS, check_layout, placement_of
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
