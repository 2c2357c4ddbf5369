"""The curricula of the tests."""

from collections.abc import Mapping, Sequence


def weakest_first(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Give more weight to domains with lower rewards."""
    means = {name: sum(recent) / len(recent) if recent else 0.0 for name, recent in rewards.items()}
    return {name: 1.0 + max(means.values()) - mean for name, mean in means.items()}


def empty(rewards: Mapping[str, Sequence[float]]) -> float:
    """Fail as a bad curriculum does: it divides by a count that is still zero."""
    return sum(sum(recent) / len(recent) for recent in rewards.values())
