"""Fault budget: a domain with too many faults of its environment is paused and tried again later. Pure.

Each group counts once, by the share of its episodes that failed: a task whose environment can never be made fails over
and over, and proves nothing about others. Only the last MAX_KEPT_GROUPS count, so that a bad minute weighs the same in
an old domain as in a new one. After a pause a single group may start, and its first episode to end decides: without a
fault the domain is open again, with one the next pause is twice as long. If that group is cancelled, another may start.
The caller supplies the time.

Domains may share an environment, as all agent programs do, and each has its own budget: their options differ.
"""

from dataclasses import dataclass, field
from statistics import fmean

MAX_KEPT_GROUPS = 16
"""The number of recent groups that count."""
MIN_ENDINGS = 8
"""The number of endings below which no domain is paused: a fault or two at the start prove little."""
MIN_GROUPS = 3
"""The number of groups below which no domain is paused: a task or two that cannot be played prove little."""
FIRST_PAUSE_S = 15.0
MAX_DOMAIN_PAUSE_S = 600.0


@dataclass
class _GroupEndings:
    """The ended episodes of one group, in all its starts."""

    num_ended: int = 0
    num_faults: int = 0

    @property
    def fault_share(self) -> float:
        return self.num_faults / self.num_ended


@dataclass
class _DomainFaults:
    """The recent endings and pauses of one domain."""

    endings: dict[str, _GroupEndings] = field(default_factory=dict)
    """The ended episodes of recent groups, the oldest group first."""
    num_pauses: int = 0
    """Pauses since it was last open."""
    closed_until: float = 0.0
    trial: str | None = None
    """The group that was started after a pause, until the first of its episodes has ended."""


class FaultBudget:
    """The fault budgets of the domains of one env worker."""

    def __init__(self, *, max_fault_share: float, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Set the share of endings that may be faults; with `max_fault_share` 1 no domain is ever paused."""
        self._max_fault_share = max_fault_share
        self._first_pause_s = first_pause_s
        self._domains: dict[str, _DomainFaults] = {}

    def may_start(self, domain: str, *, now: float) -> bool:
        """Return whether a group of this domain may start now."""
        known = self._domains.get(domain)
        return known is None or (now >= known.closed_until and known.trial is None)

    def record_start(self, domain: str, *, group: str) -> None:
        """Record that a group has started; after a pause it stays the only one until one of its episodes has ended."""
        known = self._domains.get(domain)
        if known is not None and known.num_pauses:
            known.trial = group

    def record_cancel(self, domain: str, *, group: str) -> None:
        """Record that a group starts no more episodes; another may be tried if this one has decided nothing."""
        known = self._domains.get(domain)
        if known is not None and known.trial == group:
            known.trial = None

    def record_end(self, domain: str, *, group: str, fault: bool, now: float) -> float | None:
        """Record how an episode ended; return for how many seconds the domain is paused from now, or None."""
        known = self._domains.setdefault(domain, _DomainFaults())
        if now < known.closed_until:  # it started before the pause, which already accounts for it
            return None
        if known.num_pauses and not fault:
            known.num_pauses, known.trial = 0, None
        endings = known.endings.setdefault(group, _GroupEndings())
        endings.num_ended += 1
        endings.num_faults += fault
        if len(known.endings) > MAX_KEPT_GROUPS:
            del known.endings[next(iter(known.endings))]
        if not fault or not self._is_over(known):
            return None
        pause_s: float = min(self._first_pause_s * 2**known.num_pauses, MAX_DOMAIN_PAUSE_S)
        known.num_pauses += 1
        known.closed_until = now + pause_s
        known.trial = None
        known.endings.clear()
        return pause_s

    def _is_over(self, domain: _DomainFaults) -> bool:
        if domain.trial is not None:
            return True
        groups = domain.endings.values()
        if len(groups) < MIN_GROUPS or sum(group.num_ended for group in groups) < MIN_ENDINGS:
            return False
        return fmean(group.fault_share for group in groups) > self._max_fault_share
