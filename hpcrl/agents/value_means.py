"""Figures of agents that learn a value, from sums over a batch."""

from __future__ import annotations


def value_means(sums: dict[str, float], count: float) -> dict[str, float]:
    """Return means per transition, and the value's explained variance.

    Args:
      sums: metrics summed over a global batch, among them value_target, value_error (target
        less value) and the sums of their squares.
      count: transitions.

    Returns:
      All means but those of value_error and the squares; and `explained_variance`,
      1 - Var(target - value) / Var(target), 0 when targets do not vary.
    """
    means = {name: total / max(count, 1.0) for name, total in sums.items()}
    error_variance = means.pop("value_error_squared") - means.pop("value_error") ** 2
    variance = means.pop("value_target_squared") - means["value_target"] ** 2
    means["explained_variance"] = 1.0 - error_variance / variance if variance > 0 else 0.0
    return means
