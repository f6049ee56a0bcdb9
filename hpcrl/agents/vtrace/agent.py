"""The V-trace agent as the roles see it."""

from __future__ import annotations

from hpcrl.agents import Agent, policy_acting
from hpcrl.agents.vtrace import loss as losses


class VTraceAgent:
    """Satisfies `hpcrl.agents.Agent`."""

    behaviour_spec = staticmethod(policy_acting.behaviour_spec)
    make_network = staticmethod(policy_acting.make_network)
    exploration = staticmethod(policy_acting.exploration)
    act = staticmethod(policy_acting.act)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(losses.summarize)


AGENT: Agent = VTraceAgent()
