"""Find out that no domain of a job trains anything, so that its nodes are not held for nothing.

DomainWatch     follows how the episodes and rewards of each domain end
watch_domains   makes it for a job
add_untrained   adds those that trained nothing to the end of a job that made the last step
DOMAIN_INTERVAL_S, MIN_FAILURES, MIN_STEPS, FAULT_PATIENCE_S     limits

Only a job in which no domain had one good result is ended: events are read until there is one, and not after that. What
the policy may have caused (a program that ends with an error) can change while it learns, and must fail for the
episodes of several steps. Faults of the infrastructure may pass, and must last for some minutes.
"""

import heapq
import time
from collections.abc import Callable, Collection, Iterable
from itertools import chain

import msgspec

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, EpisodesCounted, FaultReported, SegmentScored
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.recipe import Recipe
from hpcrl.job.batch_log import note_in_log
from hpcrl.monitor.advisories import HealthFacts, find_advisories, select_untrained
from hpcrl.monitor.progress import CampaignProgress, DomainProgress
from hpcrl.spool.ids import parse_domain
from hpcrl.spool.outcome import is_infrastructure

DOMAIN_INTERVAL_S = 5.0
MIN_FAILURES = 64
MIN_STEPS = 4
"""The steps whose episodes must have failed, where the policy may be the cause."""
FAULT_PATIENCE_S = 120.0


def watch_domains(campaign: CampaignDir, *, job: int, recipe: Recipe) -> "DomainWatch":
    """Return the watch over the domains of a job that are trained."""
    readers = [EventReader.for_role(campaign.events, role, job=job) for role in ("env", "reward")]
    return DomainWatch(
        [name for name, domain in recipe.domains.items() if not domain.held_out] if recipe.has_rollouts else [],
        episodes_per_step=recipe.rollout.group_size * recipe.train.groups_per_step,
        poll_events=lambda: chain.from_iterable(reader.poll() for reader in readers),
    )


def add_untrained(end: JobEnd, *, job: JobDir) -> JobEnd:
    """Add what was not trained to the end of a job that made the last step."""
    try:
        untrained = _list_untrained_domains(job.campaign, job=job.number)
    except OSError as error:  # the campaign is done all the same
        note_in_log(f"hpcrl: whether every domain was trained is not known: {error}")
        return end
    if not untrained:
        return end
    reason = f"{end.reason}, but not everything was trained: {'; '.join(untrained)}"
    return msgspec.structs.replace(end, reason=reason, untrained=untrained)


def _list_untrained_domains(campaign: CampaignDir, *, job: int) -> list[str]:
    """Return a sentence for each domain that trains nothing, by the last events of a job: its logs may be long."""
    progress = CampaignProgress()
    readers = [EventReader.for_role(campaign.events, role, job=job) for role in ("env", "reward")]
    for reader in readers:
        reader.skip_to_tails()
    for event in heapq.merge(*(reader.poll_merged() for reader in readers), key=lambda event: event.time):
        progress.add(event)
    facts = HealthFacts(campaign=campaign.name, progress=progress, now=time.time(), is_running=False)
    return [advisory.text for advisory in select_untrained(find_advisories(facts))]


class DomainWatch:
    """Finds, in the events of one job, that none of its domains trains anything."""

    def __init__(
        self,
        domains: Collection[str],
        *,
        episodes_per_step: int,
        poll_events: Callable[[], Iterable[CampaignEvent]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch the domains that are trained."""
        self._domains = domains
        self._num_policy_failures = max(MIN_FAILURES, MIN_STEPS * episodes_per_step)
        self._poll_events = poll_events
        self._clock = clock
        self._progress = CampaignProgress()
        self._looked_at = float("-inf")
        self._failing_since: float | None = None
        self._reasons: dict[str, str] = {}
        self._is_over = not domains

    def find_end(self) -> str | None:
        """Return why the job must end: no domain has had a good result; None while that is not certain."""
        now = self._clock()
        if self._is_over or now - self._looked_at < DOMAIN_INTERVAL_S:
            return None
        self._looked_at = now
        for event in self._poll_events():
            self._add(event)
        domains = {name: self._progress.domains.get(name, DomainProgress()) for name in self._domains}
        if any(one.played.num_good and one.scored.num_good for one in domains.values()):
            self._is_over = True
            return None
        if any(_count_failures(one) for one in domains.values()) and self._failing_since is None:
            self._failing_since = now
        if not all(self._is_hopeless(one, now) for one in domains.values()):
            return None
        return "no domain trains anything: " + "; ".join(self._describe(name, one) for name, one in domains.items())

    def _add(self, event: CampaignEvent) -> None:
        match event:
            case EpisodesCounted() | SegmentScored():
                self._progress.add(event)
            case FaultReported(what="env-fault" | "policy-fault" | "reward"):
                domain = event.domain or parse_domain(event.id or "")
                self._reasons[domain] = event.detail

    def _is_hopeless(self, domain: DomainProgress, now: float) -> bool:
        num = _count_failures(domain)
        if _fails_by_itself(domain):
            return num >= self._num_policy_failures
        since = now if self._failing_since is None else self._failing_since
        return num >= MIN_FAILURES and now - since >= FAULT_PATIENCE_S

    def _describe(self, name: str, domain: DomainProgress) -> str:
        what = "rewards" if domain.played.num_good else "episodes"
        why = self._reasons.get(name) or ", ".join(+domain.settle_outcomes())
        return f"domains.{name}: all {_count_failures(domain):,} {what} failed, the last: {why}"


def _count_failures(domain: DomainProgress) -> int:
    """Return how many episodes or rewards have failed, without a good one; 0 if there was one."""
    if not domain.played.num_good:
        return domain.played.num_failed_in_row
    return 0 if domain.scored.num_good else domain.scored.num_failed_in_row


def _fails_by_itself(domain: DomainProgress) -> bool:
    """Return whether most failures are of the policy or of a reward function, and not of the infrastructure."""
    outcomes = domain.settle_outcomes()
    num_faults = sum(num for name, num in outcomes.items() if is_infrastructure(name))
    return bool(domain.reward_errors) or 2 * num_faults < outcomes.total()
