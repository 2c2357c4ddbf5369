"""Which turn goes first where turns wait: what rides on a request for the engines to order their queues by. Pure.

level      a trajectory's place, by the service it has had: the less, the sooner (least attained service)
Credits    deficit counters: domains that had more than their share go behind those that had less
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

NUM_LEVELS = 16
HELD_OUT_LEVEL = 2 * NUM_LEVELS
"""Turns of evaluations go behind all others, also those of domains without credit."""
FIRST_LEVEL_TOKENS = 512
"""Service up to this is level 0; every level above is twice as wide."""
STARVED = 2.0
"""A trajectory that has waited so many times as long as it was served goes first again."""
QUANTUM_TOKENS = 8192.0
"""What a domain of weight 1 may use before it has to let others go first."""


def level(*, attained_tokens: float, attained_s: float, waited_s: float) -> int:
    """0 goes first. Long trajectories yield to short ones, but only until they have waited too long for it."""
    if waited_s > STARVED * attained_s:
        return 0
    return min(NUM_LEVELS - 1, (int(attained_tokens) // FIRST_LEVEL_TOKENS).bit_length())


@dataclass
class Credits:
    """What each domain may still use before it goes behind the others."""

    weights: Mapping[str, float]
    left: dict[str, float] = field(default_factory=dict)

    def spend(self, domain: str, tokens: float) -> None:
        self.left[domain] = self.left.get(domain, self._quantum(domain)) - tokens

    def has_credit(self, domain: str) -> bool:
        return self.left.get(domain, 1.0) > 0

    def replenish(self, demanding: Iterable[str]) -> None:
        """New credit for all once none of those that want something has any left; debts stay."""
        domains = list(demanding)
        if not domains or any(self.has_credit(domain) for domain in domains):
            return
        short = min(-self.left[domain] / self._quantum(domain) for domain in domains)
        rounds = int(short) + 1
        for domain in self.left:
            quantum = self._quantum(domain)
            self.left[domain] = min(quantum, self.left[domain] + rounds * quantum)

    def _quantum(self, domain: str) -> float:
        return QUANTUM_TOKENS * self.weights.get(domain, 1.0)
