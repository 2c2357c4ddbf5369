"""How many faults a family of environments may have: one over its budget is paused and tried again later. Pure.

Only the last WINDOW endings of a family count, so that a bad minute of an old family weighs as much as that of a new
one. After a pause a single group may begin, and the first of its episodes to end decides: without a fault the family is
open again, else the next pause is twice as long. The clock is the caller's.
"""

from collections import deque
from dataclasses import dataclass, field

MAX_KEPT_ENDINGS = 32
"""Endings that are looked at."""
MIN_SAMPLES = 8
"""Below so many endings nothing is judged: a fault or two at the start say little."""
FIRST_PAUSE_S = 15.0
MAX_PAUSE_S = 600.0


@dataclass
class _FamilyFaults:
    """What is known of one family."""

    endings: deque[bool] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_ENDINGS))
    """True for a fault, oldest first."""
    num_pauses: int = 0
    """Since it was last open."""
    closed_until: float = 0.0
    is_probing: bool = False
    """A pause is over, and what was begun since has not ended yet."""


class FaultBudget:
    """The fault budgets of the families of one env host."""

    def __init__(self, *, max_fault_share: float, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """`max_fault_share`: the share of endings that may be faults; at 1 no family is ever paused."""
        self._max_fault_share = max_fault_share
        self._first_pause_s = first_pause_s
        self._families: dict[str, _FamilyFaults] = {}

    def may_start(self, family: str, *, now: float) -> bool:
        """Whether a group of this family may begin now."""
        known = self._families.get(family)
        return known is None or (now >= known.closed_until and not known.is_probing)

    def record_start(self, family: str) -> None:
        """A group has begun; after a pause it is the only one until one of its episodes has ended."""
        known = self._families.get(family)
        if known is not None and known.num_pauses:
            known.is_probing = True

    def record_end(self, family: str, *, fault: bool, now: float) -> float | None:
        """Book the end of an episode; returns for how many seconds the family is paused from now on, if it is."""
        known = self._families.setdefault(family, _FamilyFaults())
        if now < known.closed_until:  # it was begun before the pause, and the pause has judged it already
            return None
        if known.num_pauses and not fault:
            known.num_pauses, known.is_probing = 0, False
        known.endings.append(fault)
        if not fault or not self._is_over(known):
            return None
        pause_s: float = min(self._first_pause_s * 2**known.num_pauses, MAX_PAUSE_S)
        known.num_pauses += 1
        known.closed_until = now + pause_s
        known.is_probing = False
        known.endings.clear()
        return pause_s

    def _is_over(self, family: _FamilyFaults) -> bool:
        if family.is_probing:
            return True
        return len(family.endings) >= MIN_SAMPLES and sum(family.endings) / len(family.endings) > self._max_fault_share
