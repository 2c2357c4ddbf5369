"""Fault budget: a family of environments with too many faults is paused and tried again later. Pure.

Only the last MAX_KEPT_ENDINGS endings of a family count, so that a bad minute weighs the same in an old family as in a
new one. After a pause a single group may start, and its first episode to end decides: without a fault the family is
open again, with one the next pause is twice as long. The caller supplies the time.
"""

from collections import deque
from dataclasses import dataclass, field

MAX_KEPT_ENDINGS = 32
"""The number of recent endings that count."""
MIN_SAMPLES = 8
"""The number of endings below which no family is paused: a fault or two at the start prove little."""
FIRST_PAUSE_S = 15.0
MAX_PAUSE_S = 600.0


@dataclass
class _FamilyFaults:
    """The recent endings and pauses of one family."""

    endings: deque[bool] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_ENDINGS))
    """True for a fault, oldest first."""
    num_pauses: int = 0
    """Pauses since it was last open."""
    closed_until: float = 0.0
    is_probing: bool = False
    """True once a pause is over, until the first episode started since has ended."""


class FaultBudget:
    """The fault budgets of the families of one env worker."""

    def __init__(self, *, max_fault_share: float, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Set the share of endings that may be faults; with `max_fault_share` 1 no family is ever paused."""
        self._max_fault_share = max_fault_share
        self._first_pause_s = first_pause_s
        self._families: dict[str, _FamilyFaults] = {}

    def may_start(self, family: str, *, now: float) -> bool:
        """Return whether a group of this family may start now."""
        known = self._families.get(family)
        return known is None or (now >= known.closed_until and not known.is_probing)

    def record_start(self, family: str) -> None:
        """Record that a group has started; after a pause it stays the only one until one of its episodes has ended."""
        known = self._families.get(family)
        if known is not None and known.num_pauses:
            known.is_probing = True

    def record_end(self, family: str, *, fault: bool, now: float) -> float | None:
        """Record the end of an episode; return for how many seconds the family is paused from now, or None."""
        known = self._families.setdefault(family, _FamilyFaults())
        if now < known.closed_until:  # it started before the pause, which already accounts for it
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
