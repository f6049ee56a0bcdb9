"""The R2D2 agent as the roles see it."""

from __future__ import annotations

from hpcrl.agents import ReplayAgent, ReplayWindow, q_acting, q_loss
from hpcrl.agents.r2d2 import loss as losses
from hpcrl.agents.r2d2.config import R2D2Config


def window(config: R2D2Config, unroll_steps: int) -> ReplayWindow:
    """Return one item per unroll: burn-in, then all its rows."""
    if config.burn_in_steps >= unroll_steps:
        raise ValueError(
            f"agent.burn_in_steps {config.burn_in_steps} must be less than learner.unroll_steps "
            f"{unroll_steps}: the recurrent state is recorded once per unroll"
        )
    return ReplayWindow(
        config.burn_in_steps,
        unroll_steps,
        config.items_per_unroll(unroll_steps),
        config.cross_episodes,
    )


class R2D2Agent:
    """Satisfies `hpcrl.agents.ReplayAgent`."""

    behaviour_spec = staticmethod(q_acting.behaviour_spec)
    make_network = staticmethod(q_acting.make_network)
    exploration = staticmethod(q_acting.exploration)
    act = staticmethod(q_acting.act)
    loss = staticmethod(losses.loss)
    summarize = staticmethod(q_loss.summarize)
    window = staticmethod(window)
    initial_priorities = staticmethod(losses.initial_priorities)


AGENT: ReplayAgent = R2D2Agent()
