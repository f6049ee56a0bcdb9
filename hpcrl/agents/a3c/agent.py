"""The A3C agent as the roles see it."""

from __future__ import annotations

from hpcrl.agents import GradientAgent, policy_acting
from hpcrl.agents.a3c import loss as losses


class A3CAgent:
    """Satisfies `hpcrl.agents.GradientAgent`."""

    metrics: tuple[str, ...] = losses.METRICS
    behaviour_spec = staticmethod(policy_acting.behaviour_spec)
    make_network = staticmethod(policy_acting.make_network)
    exploration = staticmethod(policy_acting.exploration)
    act = staticmethod(policy_acting.act)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(losses.summarize)


AGENT: GradientAgent = A3CAgent()
