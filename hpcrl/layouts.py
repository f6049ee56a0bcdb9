"""Layouts: checked combinations of placement, agent and synchrony, which are separate inside."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.root import Config
from hpcrl.topology import Placement


@dataclass(frozen=True)
class LayoutRules:
    """What a layout allows.

    Attributes:
      placements: where actions may be chosen; the first is meant by `placement: auto`.
      agents: that learn in it.
      synchronous: whether acting waits for the weights of every learner step.
      meaning: in one clause, for messages.
    """

    placements: tuple[Placement, ...]
    agents: tuple[str, ...]
    synchronous: bool
    meaning: str


LAYOUTS: dict[str, LayoutRules] = {
    "seed": LayoutRules(
        ("central",), ("vtrace",), False, "inference ranks act and learners correct for the lag"
    ),
    "impala": LayoutRules(
        ("local",), ("vtrace",), False, "workers act and learners correct for the lag"
    ),
    "replay": LayoutRules(
        ("central",), ("r2d2", "apex"), False, "learners draw from a prioritized replay"
    ),
}
"""By the value of the key `layout`."""


def rules_of(config: Config) -> LayoutRules:
    """Return what the configured layout allows."""
    return LAYOUTS[config.layout]


def placement_of(config: Config) -> Placement:
    """Return where actions are chosen: the configured placement, or the layout's own."""
    return rules_of(config).placements[0] if config.placement == "auto" else config.placement


def check_layout(config: Config) -> None:
    """Check that layout, placement, agent, network and lag bound go together.

    Raises:
      ValueError: they don't; says which and why.
    """
    rules, name = rules_of(config), config.layout
    agent = config.agent.name
    if agent not in rules.agents:
        fitting = [layout for layout, other in LAYOUTS.items() if agent in other.agents]
        raise ValueError(
            f"agent.name {agent} learns in layout: {' or '.join(fitting)}, got layout: {name}, "
            f"where {rules.meaning} and whose agents are {', '.join(rules.agents)}"
        )
    if config.placement != "auto" and config.placement not in rules.placements:
        raise ValueError(
            f"placement {config.placement} does not go with layout: {name}, where {rules.meaning}: "
            f"its placement is {' or '.join(rules.placements)}"
        )
