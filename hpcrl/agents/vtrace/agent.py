"""The V-trace agent as the roles see it."""

from __future__ import annotations

from hpcrl.agents import Agent
from hpcrl.agents.vtrace import acting
from hpcrl.agents.vtrace import loss as losses


class VTraceAgent:
    """Satisfies `hpcrl.agents.Agent`."""

    behaviour_spec = staticmethod(acting.behaviour_spec)
    act = staticmethod(acting.act)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(losses.summarize)


AGENT: Agent = VTraceAgent()
