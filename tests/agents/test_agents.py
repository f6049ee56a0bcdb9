import subprocess
import sys

import pytest

from hpcrl.agents import AGENTS, load_agent


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_loads_and_has_the_interface(name):
    agent = load_agent(name)
    assert agent.behaviour_spec()
    assert all(map(callable, (agent.act, agent.loss, agent.summarize)))


def test_an_unknown_agent_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="no agent 'dqn'; agents are vtrace"):
        load_agent("dqn")


def test_configs_are_read_without_torch():
    program = "import sys, hpcrl.agents.vtrace.config; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
