"""Curricula of the tests."""

from collections.abc import Mapping, Sequence


def weakest_first(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The worse a domain goes, the more of it."""
    means = {name: sum(recent) / len(recent) if recent else 0.0 for name, recent in rewards.items()}
    return {name: 1.0 + max(means.values()) - mean for name, mean in means.items()}


def empty(rewards: Mapping[str, Sequence[float]]) -> float:
    """No curriculum: it divides by what there is not yet."""
    return sum(sum(recent) / len(recent) for recent in rewards.values())
