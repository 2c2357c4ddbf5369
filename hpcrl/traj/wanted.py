"""Which trajectories a command is about."""

import difflib
from collections.abc import Collection
from typing import Any

import msgspec

from hpcrl.errors import SpoolError
from hpcrl.spool.record import Facts


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Filters; None or nothing lets everything through."""

    domains: frozenset[str] = frozenset()
    group: str | None = None
    statuses: frozenset[str] = frozenset()
    min_version: int | None = None
    """Of the version that the episode began with: staleness counts from there."""
    max_version: int | None = None

    def admits(self, facts: Facts) -> bool:
        return (
            (not self.domains or facts.domain in self.domains)
            and (self.group is None or facts.group == self.group)
            and (not self.statuses or facts.status in self.statuses)
            and (self.min_version is None or facts.start_version >= self.min_version)
            and (self.max_version is None or facts.start_version <= self.max_version)
        )


def from_arguments(arguments: Any, *, known_domains: Collection[str]) -> Wanted:
    """The filters of a command line; a domain that the recipe does not have is a mistake."""
    for domain in arguments.domain or ():
        if known_domains and domain not in known_domains:
            near = difflib.get_close_matches(domain, known_domains, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known_domains))}"
            raise SpoolError(f"--domain {domain!r} is no domain of the campaign's recipe: {hint}")
    low, high = arguments.min_version, arguments.max_version
    if low is not None and high is not None and low > high:
        raise SpoolError(f"--min-version {low} is above --max-version {high}: nothing can be between")
    return Wanted(
        domains=frozenset(arguments.domain or ()),
        group=arguments.group,
        statuses=frozenset(arguments.status or ()),
        min_version=low,
        max_version=high,
    )
