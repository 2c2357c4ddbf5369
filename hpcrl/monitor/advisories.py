"""Find what is wrong with a campaign: ranked advisories, each with a figure, its threshold, a cause and a remedy. Pure.

    find_advisories(HealthFacts(campaign=..., progress=..., now=..., is_running=True))

Advisory            one finding
HealthFacts         the facts that are judged
find_advisories     all findings, the worst first
select_untrained    those that a domain trains nothing
describe_advisory   a finding in one line
Severity            how bad one is
RULES               the rules, each a function of the facts

The monitor, `--watch`, the last lines of a campaign and its report use these. A rule yields nothing where it has too
few figures to judge: a campaign that has just started has no advisories.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

import msgspec

from hpcrl.campaign_dir.events import StepFinished
from hpcrl.monitor.progress import (
    MIN_OCCUPIED_SHARE,
    CampaignProgress,
    DomainProgress,
    FailureRun,
    RecentLoad,
    WorkerFailure,
    WorkerProgress,
    join_loads,
)
from hpcrl.spool.ids import is_held_out
from hpcrl.spool.outcome import (
    MAX_FAILED_SHARE,
    OUTCOME_REWARD_ERROR,
    OUTCOMES,
    is_failure,
    is_infrastructure,
    measure_failures,
    measure_outcomes,
)
from hpcrl.system.file_watch import names_full_disk
from hpcrl.system.terminal import format_duration

Severity = Literal["critical", "warning", "notice"]
_SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "notice")

MIN_FAILED_AT_START, MIN_FAILED_IN_ROW = 16, 64
"""Failures without one good result: since the start, or since the last good one."""
MIN_ENDED = 64
"""The fewest ended episodes whose shares are judged."""
RECENT_STEPS = 20
"""The steps that a rule calls recent."""
MIN_STEPS = 30
"""The fewest steps by which learning is judged."""
NUM_ERRORS = 2.0
"""Changes of the reward below this number of standard errors are noise."""
MAX_LIKENESS = 0.8
"""The greatest correlation of a step's reward with the one before that noise is ascribed; a steady fall has more."""
MIN_GAIN = 0.1
"""A reward that has risen by less, as a share of its spread over episodes, has not risen."""
MAX_OUTLOOK = 5.0
"""A rise that would be more than that by the last step, or after this multiple of the steps made, is only slow."""
NUM_SURE_ERRORS = 3.0
"""The standard errors that a rise may hide in: the rule is asked at every look, and slow campaigns are healthy."""
SOLVED_SHARE = 0.85
"""Tasks are solved when the reward is this far between the least and the greatest of any step."""
FULL_REWARD, MIN_FULL_SHARE = 1.0, 0.95
"""The usual reward of a solved task. Tasks of which this share is reached were solved from the start, if nothing rose;
rewards that never differ and are any other may be those of tasks that all fail."""
MAX_FLAT_SHARE = 0.5
MIN_FLAT_AT_START = 16
"""The groups from which on it counts that all since the start were flat."""
MIN_EQUAL_REWARDS = 128
"""The rewards of one of several domains from which on it counts that all are equal: then its groups are flat too."""
MAX_NAMED_DOMAINS = 3
MAX_ENV_FAULT_SHARE, MAX_REPEATED_SHARE = 0.05, 0.2
"""Episodes that are lost to faults, and those that are played again after one, which only takes time."""
MAX_TRUNCATED_SHARE = 0.25
MAX_STALE_SHARE = 0.2
MAX_SKIPPED_SHARE = 0.1
MAX_WAIT_SHARE, MIN_TRAINER_WAIT_SHARE = 0.5, 0.1
"""The shares of its time between which a trainer should wait: less, and all others wait for it."""
MIN_BUSY_SHARE = 0.2
MIN_STEADY_S, MIN_STEADY_STEPS = 600.0, 2
"""The balance between roles is judged by this time of steady work and more."""
MAX_KL_FRESH, MAX_KL = 0.02, 0.2
"""KL(acting policy || trainer's) of tokens without lag, which only a mismatch explains, and of all."""
NUM_KL_STEPS, MIN_KL_STEPS = 5, 3
"""The steps by which a mismatch is judged: few, as it may grow; and how many of them must have a figure. It is their
median that counts: one large update makes the trajectories of the next two steps, which were played before it, differ
much, and importance ratios are truncated for that. Campaigns that do well have such spikes, also at their end."""
MAX_GRADIENT_GROWTH = 10.0
SKIPPED_FOR_GRADIENT = "gradient norm"
"""The words in the reason of the trainer for a step that was skipped since its loss or gradient is not finite."""
MIN_ENTROPY_SHARE = 0.1
UNTRAINED_DOMAIN = "domain-fails"
"""The name of the finding that a domain trains nothing."""
MAX_STEP_DELAY, MIN_STEP_DELAY_S = 6.0, 300.0
MAX_START_S, MAX_FIRST_STEP_S = 1800.0, 3600.0
"""The time that the workers of a job may take to start, and that it may take until the campaign's first step."""
MIN_STEP_GAPS = 5
"""The times between steps from which on the limits above hold; with fewer, those below."""
MAX_EARLY_DELAY, MIN_EARLY_DELAY_S = 12.0, MAX_START_S
MAX_SECOND_DELAY = 3.0
"""The time of the second step, as a multiple of that of the first one, which had the start of all workers before it."""
MAX_CHECKPOINT_AGE, MIN_CHECKPOINT_AGE_S = 3.0, 3600.0
MIN_WORKER_FAILURES, MANY_WORKER_FAILURES = 3, 10
WORKERS_PER_FAILURE = 100
"""A role may lose workers once more for each such number of workers that it has."""
INCIDENT_S = 60.0
"""Workers of a role that fail within this time were lost at once, as those of a node, and count once."""
WORKER_FAILURES_S = 3600.0
"""The time in which they count: a role of a thousand workers that runs for days loses some."""
MIN_ENGINE_WINDOW_S = 120.0
MAX_FULL_AGE_S = 120.0
"""The time after a fault for lack of room in which the disk counts as full though steps are made."""


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a campaign."""

    name: str
    severity: Severity
    subject: str = ""
    """The domain or role concerned; "" for the campaign."""
    text: str
    """The finding, with its figures."""
    figure: float
    threshold: float
    unit: str
    """The unit of figure and threshold: a share, seconds, a number of something."""
    cause: str
    """The likely cause."""
    remedy: str
    """The remedy."""


@dataclass(frozen=True, kw_only=True)
class HealthFacts:
    """The facts about a campaign that are judged."""

    campaign: str
    """Its name, for the commands that are advised."""
    progress: CampaignProgress
    now: float
    is_running: bool
    """A job works on it now; without one, what should happen soon is not missed."""
    checkpoint_every: int | None = None
    """The steps from one checkpoint to the next, if the recipe is known."""
    num_steps: int | None = None
    """The steps that it is to make, if the recipe is known."""

    @property
    def steps(self) -> list[StepFinished]:
        return list(self.progress.steps.values())

    @property
    def recent_steps(self) -> list[StepFinished]:
        return self.steps[-RECENT_STEPS:]


def find_advisories(facts: HealthFacts) -> list[Advisory]:
    """Return the findings, the worst first; of equal severity, the one farthest beyond its threshold."""
    return sorted((found for rule in RULES for found in rule(facts)), key=_rank_advisory)


def select_untrained(advisories: Iterable[Advisory]) -> list[Advisory]:
    """Return the findings that a domain trains nothing."""
    return [advisory for advisory in advisories if advisory.name == UNTRAINED_DOMAIN]


def describe_advisory(advisory: Advisory) -> str:
    """Describe a finding in one line: what, the likely cause, what to do."""
    return f"{advisory.text}: {advisory.cause}; {advisory.remedy}"


def _rank_advisory(advisory: Advisory) -> tuple[int, float]:
    low, high = sorted((abs(advisory.figure), abs(advisory.threshold)))
    excess = high / low if low > 0 else math.inf
    return _SEVERITIES.index(advisory.severity), -excess


# ---- episodes


def _find_failing_domains(facts: HealthFacts) -> Iterator[Advisory]:
    """Find domains of whose episodes or rewards all fail, or most."""
    for name, domain in sorted(facts.progress.domains.items()):
        run = _find_longest_run(domain)
        whole, recent = domain.settle_outcomes(), domain.recent_outcomes
        # The recent ones are as they were played: rewards that failed are counted over the whole campaign.
        is_recent = OUTCOME_REWARD_ERROR not in whole or measure_failures(recent) > measure_failures(whole)
        outcomes: Mapping[str, float] = recent if is_recent else whole
        share = measure_failures(outcomes)
        is_scored = run is domain.scored
        if run.num_failed_in_row >= _limit_in_row(run):
            which = "all" if not run.num_good else "the last"
            what = "rewards" if is_scored else "episodes"
            worst = _find_worst(domain.recent_outcomes)
            has_episodes = is_scored or not is_infrastructure(worst)
            yield Advisory(
                name=UNTRAINED_DOMAIN,
                severity="critical",
                subject=name,
                text=f"domain {name}: {which} {run.num_failed_in_row:,} {what} failed, so it trains nothing",
                figure=run.num_failed_in_row,
                threshold=_limit_in_row(run),
                unit="failures in a row",
                cause="its reward function fails" if is_scored else _name_worst(domain.recent_outcomes),
                remedy=f"read one of its episodes: `hpcrl traj ls {facts.campaign} --domain {name}`"
                if has_episodes
                else f"read its newest faults: {_name_faults(facts)}",
            )
        elif domain.num_ended >= MIN_ENDED and share > MAX_FAILED_SHARE:
            yield Advisory(
                name="domain-failing",
                severity="warning",
                subject=name,
                text=f"domain {name}: {share:.0%} of {'recent' if is_recent else 'its'} episodes failed",
                figure=share,
                threshold=MAX_FAILED_SHARE,
                unit="share of episodes",
                cause=_name_worst(outcomes),
                remedy="its program, its judge or its reward may be broken: read its newest faults: "
                f"{_name_faults(facts)}",
            )


def _list_untrained(facts: HealthFacts) -> set[str]:
    """Return the domains of which all episodes or rewards fail."""
    runs = {name: _find_longest_run(domain) for name, domain in facts.progress.domains.items()}
    return {name for name, run in runs.items() if run.num_failed_in_row >= _limit_in_row(run)}


def _find_longest_run(domain: DomainProgress) -> FailureRun:
    return max(domain.played, domain.scored, key=lambda run: run.num_failed_in_row)


def _limit_in_row(run: FailureRun) -> int:
    return MIN_FAILED_IN_ROW if run.num_good else MIN_FAILED_AT_START


def _find_env_faults(facts: HealthFacts) -> Iterator[Advisory]:
    """Find domains whose environments fail: their episodes are lost, or played again until one attempt succeeds."""
    for name, domain in sorted(facts.progress.domains.items()):
        outcomes = domain.recent_outcomes
        lost_share = sum(num for outcome, num in measure_outcomes(outcomes).items() if is_infrastructure(outcome))
        num = sum(outcomes.values())
        repeated_share = domain.recent_env_faults / num - lost_share if num > 0 else 0.0
        if domain.num_ended < MIN_ENDED or lost_share > MAX_FAILED_SHARE:
            continue
        are_lost = lost_share > MAX_ENV_FAULT_SHARE
        if are_lost or repeated_share > MAX_REPEATED_SHARE:
            share = lost_share if are_lost else min(repeated_share, 1.0)
            what = "were lost to faults of the infrastructure" if are_lost else "were played again after a fault"
            yield Advisory(
                name="env-faults",
                severity="warning",
                subject=name,
                text=f"domain {name}: {share:.1%} of recent episodes {what}",
                figure=share,
                threshold=MAX_ENV_FAULT_SHARE if are_lost else MAX_REPEATED_SHARE,
                unit="share of episodes",
                cause="environments, reward functions or engines fail and are tried again",
                remedy=f"read the faults by node ({_name_faults(facts)}): exclude a bad node, leave out a bad task",
            )


def _find_truncation(facts: HealthFacts) -> Iterator[Advisory]:
    """Find domains whose episodes are cut off: by length at any time, by max_turns once the policy has trained."""
    has_trained = len(facts.progress.steps) >= MIN_STEPS
    for name, domain in sorted(facts.progress.domains.items()):
        shares = measure_outcomes(domain.recent_outcomes)
        by_length = shares.get("overflow", 0.0) + shares.get("truncated", 0.0)
        by_turns = shares.get("max-turns", 0.0) if has_trained else 0.0
        if domain.num_ended < MIN_ENDED or by_length + by_turns <= MAX_TRUNCATED_SHARE:
            continue
        is_length = by_length > by_turns
        yield Advisory(
            name="truncation",
            severity="warning" if is_length else "notice",
            subject=name,
            text=f"domain {name}: {by_length + by_turns:.0%} of recent episodes were cut off at a limit",
            figure=by_length + by_turns,
            threshold=MAX_TRUNCATED_SHARE,
            unit="share of episodes",
            cause="their conversations fill the context" if is_length else "they use up max_turns",
            remedy="raise model context or rollout.max_new_tokens, or shorten observations"
            if is_length
            else f"raise domains.{name}.max_turns, or reward shorter ways",
        )


def _find_stale_episodes(facts: HealthFacts) -> Iterator[Advisory]:
    first = facts.recent_steps[0].step - 1 if facts.recent_steps else 0  # episodes end before their step
    first = max(first, facts.progress.resumed_step + 1)
    recent = [counts for counts in facts.progress.recent_staleness if counts.step >= first]
    num_ended, num_stale = sum(counts.num_ended for counts in recent), sum(counts.num_stale for counts in recent)
    num_stale = min(num_stale, num_ended)  # a trainer that starts again drops the same ones once more
    if num_ended >= MIN_ENDED and num_stale / num_ended > MAX_STALE_SHARE:
        yield Advisory(
            name="stale-episodes",
            severity="warning",
            text=f"{num_stale / num_ended:.0%} of {num_ended:,} recent episodes became too old to train on",
            figure=num_stale / num_ended,
            threshold=MAX_STALE_SHARE,
            unit="share of episodes",
            cause="episodes take longer than rollout.max_lag steps of the trainer",
            remedy="raise rollout.max_lag, add decode workers, or raise train.groups_per_step",
        )


def _name_faults(facts: HealthFacts) -> str:
    """Name the command that prints the faults: an episode that is lost to one has no record."""
    return f"`hpcrl events {facts.campaign} --kind fault`"


def _find_worst(outcomes: Mapping[str, float]) -> str:
    """Return the most frequent failure of a domain; "" without any."""
    failed = {name: num for name, num in outcomes.items() if is_failure(name)}
    return max(failed, key=lambda name: failed[name], default="")


def _name_worst(outcomes: Mapping[str, float]) -> str:
    worst = _find_worst(outcomes)
    if not worst:
        return "its rewards or episodes fail"
    return f"{worst}: {OUTCOMES[worst].text}" if worst in OUTCOMES else worst


# ---- learning


def _find_reward_trend(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a reward that has not risen or has fallen, of the campaign or of some of several domains."""
    found = list(_find_campaign_trend(facts))
    yield from found
    if not any(advisory.name == "reward-stalled" for advisory in found):
        yield from _find_stalled_domains(facts)


def _find_campaign_trend(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a reward that has not risen since the start, or that has fallen from where it was."""
    rewards = _finite(step.reward_mean for step in facts.steps)
    if len(rewards) < MIN_STEPS:
        return
    size = len(rewards) // 3
    first, last = rewards[:size], rewards[-size:]
    best = max((rewards[start : start + size] for start in range(0, len(rewards) - size + 1, size)), key=fmean)
    gain, doubt = fmean(last) - fmean(first), _noise(first, last, num_errors=NUM_SURE_ERRORS)
    num_expected = min(max(facts.num_steps or 0, len(rewards)), MAX_OUTLOOK * len(rewards))
    outlook = (gain + _noise(first, last, num_errors=1.0)) / (len(rewards) - size) * num_expected
    spread = max(fmean(_finite(step.reward_std for step in facts.steps) or [0.0]), stdev(rewards))
    loss, loss_noise = fmean(best) - fmean(last), _noise(best, last)
    if loss > 2 * loss_noise and loss > 0.25 * max(fmean(best) - min(rewards), 1e-9):
        yield Advisory(
            name="reward-falls",
            severity="critical",
            text=f"the reward fell from {fmean(best):.3f} to {fmean(last):.3f} (means of {size} steps)",
            figure=loss,
            threshold=2 * loss_noise,
            unit="reward",
            cause="updates are too large, or the policy has learned to exploit the reward",
            remedy="resume from the checkpoint before with a lower train.learning_rate, read episodes of both",
        )
    elif (
        max(doubt, gain + doubt, outlook) <= MIN_GAIN * spread
        and not _has_risen_early(rewards)
        and not _is_solved(facts)
    ):
        yield Advisory(
            name="reward-stalled",
            severity="warning",
            text=f"the reward has not risen in {len(rewards):,} steps: {fmean(first):.3f} -> {fmean(last):.3f}",
            figure=gain + doubt,
            threshold=MIN_GAIN * spread,
            unit="reward",
            cause="the tasks give no signal (all fail or all succeed), or the learning rate is too low",
            remedy="read the best and the worst episodes, look at the share of flat groups, raise train.learning_rate",
        )


def _find_stalled_domains(facts: HealthFacts) -> Iterator[Advisory]:
    """Find those of several domains whose reward was the same throughout, though that of the campaign changes."""
    domains = {name: one for name, one in _list_constant_domains(facts).items() if one.least == one.greatest}
    if len(facts.progress.steps) < MIN_STEPS or not domains:
        return
    rewards = list(dict.fromkeys(f"{domain.least:.3g}" for domain in domains.values()))[:MAX_NAMED_DOMAINS]
    yield Advisory(
        name="reward-stalled",
        severity="warning",
        subject=_join_domains(domains),
        text=f"the reward of {_join_domains(domains)} was {' or '.join(rewards)} in all episodes of "
        f"{len(facts.progress.steps):,} steps",
        figure=0.0,
        threshold=0.0,
        unit="spread of the reward",
        cause="the tasks give no signal: all fail, or the reward does not distinguish them",
        remedy=f"read episodes (`hpcrl traj ls {facts.campaign} --domain {next(iter(domains))}`), and test the reward",
    )


def _has_risen_early(rewards: Sequence[float]) -> bool:
    """Return whether a reward is above that of the first steps, as one that rose soon and has stayed there."""
    first, last = rewards[: MIN_STEPS // 3], rewards[-len(rewards) // 3 :]
    return fmean(last) - fmean(first) > _noise(first, last, num_errors=NUM_SURE_ERRORS)


def _find_flat_groups(facts: HealthFacts) -> Iterator[Advisory]:
    """Find groups in which no episode is better than another: of all domains, or of some of several."""
    flat = list(_find_flat_campaign(facts))
    yield from flat
    if all(advisory.severity == "notice" for advisory in flat):
        yield from _find_flat_domains(facts)


def _find_flat_domains(facts: HealthFacts) -> Iterator[Advisory]:
    """Find those of several domains whose groups are all flat, since their recent episodes have one reward."""
    domains = _list_constant_domains(facts)
    if domains:
        yield Advisory(
            name="flat-groups",
            severity="warning",
            subject=_join_domains(domains),
            text=f"all recent groups of {_join_domains(domains)} have one reward for all their episodes",
            figure=1.0,
            threshold=MAX_FLAT_SHARE,
            unit="share of groups",
            cause="these tasks are too easy or too hard for the policy",
            remedy=f"lower domains.{next(iter(domains))}.weight, mix other tasks in, or a reward with more degrees",
        )


def _list_constant_domains(facts: HealthFacts) -> dict[str, DomainProgress]:
    """Return those of several domains whose recent rewards are all equal, without those that fail or are solved."""
    trained = {name: one for name, one in sorted(facts.progress.domains.items()) if one.num and not is_held_out(name)}
    failing = _list_untrained(facts)
    if len(trained) < 2:  # the rules for the campaign judge it by its steps
        return {}
    return {name: domain for name, domain in trained.items() if name not in failing and _is_constant(domain)}


def _is_constant(domain: DomainProgress) -> bool:
    """Return whether recent rewards are all equal, and neither the full one nor one that the domain has risen to."""
    recent = domain.recent
    if len(recent) < MIN_EQUAL_REWARDS or min(recent) != max(recent) or _has_full_reward(domain):
        return False
    return domain.least == domain.greatest or recent[-1] < domain.greatest


def _join_domains(names: Collection[str]) -> str:
    """Join the names of domains; of many, the first ones and the number of the others."""
    num_more = len(names) - MAX_NAMED_DOMAINS
    return ", ".join(list(names)[:MAX_NAMED_DOMAINS]) + (f" and {num_more} more" if num_more > 0 else "")


def _find_flat_campaign(facts: HealthFacts) -> Iterator[Advisory]:
    """Find that groups of all domains are flat; where a domain fails, its groups are flat for that."""
    failing = _list_untrained(facts)
    if failing and failing >= facts.progress.domains.keys():
        return
    recent = facts.recent_steps
    first = recent[0].step if recent else 0
    num_dropped = sum(
        event.num - sum(event.domains.get(name, 0) for name in failing)
        for step, event in facts.progress.flat_dropped
        if step >= first
    )
    num_flat = num_dropped + sum(step.num_flat_groups or 0 for step in recent)
    num_groups = num_dropped + sum(step.num_groups or 0 for step in recent)
    are_all_flat = all(step.num_groups and step.num_flat_groups == step.num_groups for step in facts.steps)
    least = MIN_FLAT_AT_START if are_all_flat else 2 * RECENT_STEPS
    if num_groups < least or num_flat / num_groups <= MAX_FLAT_SHARE:
        return
    is_solved = _is_solved(facts)
    yield Advisory(
        name="flat-groups",
        severity="notice" if is_solved else "warning",
        text=f"{num_flat / num_groups:.0%} of the last {num_groups:,} groups have one reward for all their episodes",
        figure=num_flat / num_groups,
        threshold=MAX_FLAT_SHARE,
        unit="share of groups",
        cause="the tasks are solved" if is_solved else "the tasks are too easy or too hard for the policy",
        remedy="end here, or add harder tasks" if is_solved else "mix other tasks in, or a reward with more degrees",
    )


def _find_mismatch(facts: HealthFacts) -> Iterator[Advisory]:
    """Find log-probs that differ between engines and trainer: by the tokens without lag, if there are any, then by all.

    A step whose trajectories all had the newest weights has no others, also one that an older campaign reported.
    """
    recent = facts.steps[-NUM_KL_STEPS:]
    fresh = _finite(step.kl_fresh if step.lag_max or step.kl_fresh is not None else step.kl for step in recent)
    is_known = len(fresh) >= MIN_KL_STEPS
    is_fresh = is_known and median(fresh) > MAX_KL_FRESH
    values, limit = (fresh, MAX_KL_FRESH) if is_fresh else (_finite(step.kl for step in recent), MAX_KL)
    if len(values) >= MIN_KL_STEPS and median(values) > limit:
        cause = "trajectories are too old for the size of the updates"
        if is_fresh:
            cause = "engine and trainer compute differently (precision, template, sampling)"
        elif not is_known:
            cause += ", or engine and trainer compute differently"
        yield Advisory(
            name="logprob-mismatch",
            severity="critical",
            text=f"log-probs of engines and trainer differ{' without lag' * is_fresh}: KL {values[-1]:.3g} at the last "
            f"step, {median(values):.3g} in the middle of the last {len(values)}",
            figure=median(values),
            threshold=limit,
            unit="nats a token",
            cause=cause,
            remedy="use one precision for both, check top_p and temperature"
            if is_fresh
            else "lower rollout.max_lag or train.learning_rate"
            if is_known
            else "use one precision for both, check top_p and temperature, lower rollout.max_lag",
        )


def _find_bad_gradients(facts: HealthFacts) -> Iterator[Advisory]:
    norms = [step.grad_norm for step in facts.steps if step.grad_norm is not None]
    num_broken = sum(_is_not_finite(step, "grad_norm") for step in facts.recent_steps)
    before, last = _finite(norms[:-5]), _finite(norms[-5:])
    growth = median(last) / median(before) if len(before) >= RECENT_STEPS and last and median(before) > 0 else 0.0
    if num_broken or growth > MAX_GRADIENT_GROWTH:
        found = f"{num_broken} of the last steps are not finite" if num_broken else f"{growth:.0f} times that before"
        yield Advisory(
            name="gradient-explodes",
            severity="critical",
            text=f"the gradient's norm explodes: {found}",
            figure=num_broken if num_broken else growth,
            threshold=MAX_GRADIENT_GROWTH if not num_broken else 0,
            unit="times the median before" if not num_broken else "steps",
            cause="the learning rate is too high, or a few trajectories have extreme importance ratios",
            remedy="resume from the last good checkpoint with a lower train.learning_rate or train.max_grad_norm",
        )


def _find_broken_figures(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a KL or a reward that is not finite: both reach the gradient."""
    causes = {
        "kl": "log-probs of engine and trainer are too far apart to compare, or one of them is damaged",
        "reward_mean": "a reward function returns a number that is not finite",
    }
    remedies = {
        "kl": "resume from the last good checkpoint with a lower train.learning_rate or rollout.max_lag",
        "reward_mean": f"find the episodes (`hpcrl traj ls {facts.campaign}`), and let the reward raise an error",
    }
    for name, title in (("kl", "KL between engines and trainer"), ("reward_mean", "mean reward")):
        num_broken = sum(_is_not_finite(step, name) for step in facts.recent_steps)
        if num_broken:
            yield Advisory(
                name="not-finite",
                severity="critical",
                subject="train",
                text=f"the {title} of {num_broken} of the last {len(facts.recent_steps)} steps is not finite",
                figure=num_broken,
                threshold=0,
                unit="steps",
                cause=causes[name],
                remedy=remedies[name],
            )


def _is_not_finite(step: StepFinished, name: str) -> bool:
    """Return whether a figure of a step is not finite: it is null in an event, as is one that a step does not have.

    A step of the warm-up, which has no lags, has no reward, and one without a loss was not learned from, unless the
    trainer skipped it for its gradient.
    """
    value: float | None = getattr(step, name)
    if value is not None:
        return not math.isfinite(value)
    if name == "grad_norm" and SKIPPED_FOR_GRADIENT in (step.skipped or ""):
        return True
    return bool(step.lags) and (name == "reward_mean" or (step.loss is not None and bool(step.num_tokens)))


def _find_skipped_steps(facts: HealthFacts) -> Iterator[Advisory]:
    recent = facts.recent_steps
    skipped = [step for step in recent if step.skipped]
    if len(recent) >= 10 and len(skipped) / len(recent) > MAX_SKIPPED_SHARE:
        yield Advisory(
            name="steps-skipped",
            severity="warning",
            text=f"{len(skipped)} of the last {len(recent)} steps left the weights unchanged",
            figure=len(skipped) / len(recent),
            threshold=MAX_SKIPPED_SHARE,
            unit="share of steps",
            cause=skipped[-1].skipped or "",
            remedy="see the flat groups and the gradient's norm of these steps",
        )


def _find_low_entropy(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a policy that has stopped to explore before it has learned."""
    values = _finite(step.entropy for step in facts.steps)
    rewards = _finite(step.reward_mean for step in facts.steps)
    if min(len(values), len(rewards)) < MIN_STEPS or fmean(values[:5]) <= 0:
        return
    share = fmean(values[-5:]) / fmean(values[:5])
    size = len(rewards) // 3
    has_risen = fmean(rewards[-size:]) - fmean(rewards[:size]) > _noise(rewards[:size], rewards[-size:])
    if share < MIN_ENTROPY_SHARE and not has_risen and not _have_full_reward(facts):
        yield Advisory(
            name="entropy-collapse",
            severity="warning",
            text=f"the entropy is {share:.0%} of that at the start, and the reward has not risen",
            figure=share,
            threshold=MIN_ENTROPY_SHARE,
            unit="share of the first steps' entropy",
            cause="the policy has become certain of one answer before it found a good one",
            remedy="lower train.learning_rate, raise train.clip_high, or add an entropy or KL term",
        )


def _is_solved(facts: HealthFacts) -> bool:
    """Return whether recent groups are flat since their episodes do as well as the best that was ever seen."""
    if _have_full_reward(facts):
        return True
    rewards = _finite(step.reward_mean for step in facts.steps)
    spreads = _finite(step.reward_std for step in facts.recent_steps)
    if len(rewards) < MIN_STEPS or not spreads:
        return False
    low, high = min(rewards), max(rewards)
    is_high = fmean(rewards[-5:]) >= low + SOLVED_SHARE * (high - low)
    return high > low and is_high and fmean(rewards[:5]) < fmean(rewards[-5:])


def _have_full_reward(facts: HealthFacts) -> bool:
    """Return whether the recent episodes of all domains have the full reward, or nearly so."""
    known = [domain for domain in facts.progress.domains.values() if domain.recent]
    return bool(known) and all(map(_has_full_reward, known))


def _has_full_reward(domain: DomainProgress) -> bool:
    """Return whether the recent episodes of a domain have the full reward, or nearly so."""
    rewards = domain.recent
    return math.isclose(max(rewards), FULL_REWARD) and fmean(rewards) >= MIN_FULL_SHARE * FULL_REWARD


# ---- where time goes


class TrainerBalance(NamedTuple):
    """The time of steps that is judged."""

    num_steps: int
    total_s: float
    waited_s: float

    @property
    def is_known(self) -> bool:
        return self.num_steps >= MIN_STEADY_STEPS and self.total_s >= MIN_STEADY_S

    @property
    def wait_share(self) -> float:
        return self.waited_s / self.total_s


def _measure_balance(facts: HealthFacts) -> TrainerBalance:
    """Measure how long the trainer waited, by its recent steps, or by those of the last minutes if these are more.

    The first step of a job has the start of all workers before it, and does not count.
    """
    waited_s = total_s = 0.0
    num = 0
    for step, before in itertools.pairwise([*reversed(facts.steps), None]):
        assert step is not None
        if num >= RECENT_STEPS and total_s >= MIN_STEADY_S:
            break
        if before is not None and before.job == step.job and step.wait_s is not None and step.step_s is not None:
            waited_s, total_s, num = waited_s + step.wait_s, total_s + step.wait_s + step.step_s, num + 1
    return TrainerBalance(num, total_s, waited_s)


def _find_starving_trainer(facts: HealthFacts) -> Iterator[Advisory]:
    balance = _measure_balance(facts)
    if not balance.is_known or balance.wait_share <= MAX_WAIT_SHARE:
        return
    yield Advisory(
        name="trainer-waits",
        severity="warning",
        subject="train",
        text=f"the trainer waited {balance.wait_share:.0%} of the time of the last {balance.num_steps} steps",
        figure=balance.wait_share,
        threshold=MAX_WAIT_SHARE,
        unit="share of time",
        cause="rollouts are slower than training",
        remedy="move nodes from train to decode, raise rollout.max_running, or make environments faster",
    )


def _find_idle_engines(facts: HealthFacts) -> Iterator[Advisory]:
    """Find engines that are idle, or were at the end of the last job: without a request, or with hardly any.

    Those of prefill are not judged by their places: a prompt runs for a moment. A single engine that waits for the
    trainer is as it should be in a small campaign.
    """
    balance = _measure_balance(facts)
    waits_for_trainer = balance.is_known and balance.wait_share < MIN_TRAINER_WAIT_SHARE
    roles: dict[str, list[RecentLoad]] = {}
    for worker in _newest_workers(facts):
        if worker.recent_load.window_s:
            roles.setdefault(worker.role, []).append(worker.recent_load)
    known = {role: loads for role, loads in roles.items() if _is_load_known(loads)}
    is_decode_busy = "decode" in known and join_loads(known["decode"]).busy_share >= MIN_BUSY_SHARE
    for role in [one for one in ("prefill", "decode") if one in known]:
        loads = known[role]
        load = join_loads(loads)
        is_split_unused = role == "prefill" and is_decode_busy
        if load.busy_share < MIN_BUSY_SHARE:
            text = f"the {role} engines had a request to run in only {load.busy_share:.0%} of the time"
            figure, threshold, unit = load.busy_share, MIN_BUSY_SHARE, "share of time"
            cause = "the trainer, the rewards or the environments are slower than they"
        elif role == "decode" and load.is_nearly_empty and not (waits_for_trainer and len(loads) == 1):
            text = f"the {role} engines ran {load.running:.1f} requests at once, in {load.num_places:.0f} places each"
            figure, threshold, unit = load.running / load.num_places, MIN_OCCUPIED_SHARE, "share of places"
            cause = "few episodes run at once, a few long ones hold up the others, or environments are slow"
        else:
            continue
        remedy = f"lower resources.{role}.num_workers, or raise rollout.max_running"
        if is_split_unused:
            cause = "prompts are short beside what is generated from them"
            remedy = "lower resources.prefill.num_workers; with 0 the decode engines read the prompts too"
        elif waits_for_trainer:
            cause = "the trainer is slower than they, and they may not run further ahead of it"
            remedy = f"lower resources.{role}.num_workers, or move their nodes to train"
        yield Advisory(
            name="engines-idle",
            severity="notice" if is_split_unused else "warning",
            subject=role,
            text=text,
            figure=figure,
            threshold=threshold,
            unit=unit,
            cause=cause,
            remedy=remedy,
        )


def _is_load_known(loads: Sequence[RecentLoad]) -> bool:
    """Return whether the load of engines is known for long enough."""
    return sum(load.window_s for load in loads) >= MIN_ENGINE_WINDOW_S * len(loads)


def _find_full_disk(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a disk without room: the events about it may be the last that could be written, so they count for long."""
    full = [
        (note, fault)
        for fault, note in facts.progress.newest_faults.items()
        if not fault.domain and names_full_disk(note.text)  # a domain's fault is about a disk of its environment
    ]
    job = facts.progress.jobs.get(_newest_job(facts))
    if not facts.is_running or not full or job is None:
        return
    note, fault = max(full, key=lambda one: one[0].time)
    has_stepped_since = any(step.time > note.time for step in facts.steps[-1:])
    if note.time < (job.started_at or 0.0) or (has_stepped_since and facts.now - note.time > MAX_FULL_AGE_S):
        return
    yield Advisory(
        name="disk-full",
        severity="critical",
        subject=fault.what,
        text=f"the disk is full, and work waits for room ({fault.what}{f' on {fault.node}' if fault.node else ''})",
        figure=facts.progress.faults[fault],
        threshold=1,
        unit="faults",
        cause=note.text,
        remedy="make room (`hpcrl gc` names what can go), or raise the quota; if the job ends meanwhile, "
        "`hpcrl resume` continues from its last checkpoint",
    )


def _find_late_step(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a step that takes far longer than those before, or than a first one may take, while a job runs."""
    number = _newest_job(facts)
    job = facts.progress.jobs.get(number)
    if not facts.is_running or job is None:
        return
    last = next(reversed(facts.progress.steps.values()), None)
    since = last.time if last is not None and last.job == number else job.started_at
    limit_s, usual = _limit_step_delay(facts)
    if last is not None and last.job != number:  # the first step of a job has the starts of all workers before it
        limit_s += MAX_START_S
    if since is not None and facts.now - since > limit_s:
        yield Advisory(
            name="step-overdue",
            severity="critical" if last is not None else "warning",
            subject="train",
            text=f"no step for {format_duration(facts.now - since)}; {usual}",
            figure=facts.now - since,
            threshold=limit_s,
            unit="s",
            cause=_explain_late_step(facts, since=since),
            remedy="look at the roles that are not alive, and at the logs of train and env",
        )


def _limit_step_delay(facts: HealthFacts) -> tuple[float, str]:
    """Return the time that a step may take, and what that is judged by."""
    gaps = _list_step_gaps(facts)
    if not facts.progress.steps:
        return MAX_FIRST_STEP_S, f"a first one should be made within {format_duration(MAX_FIRST_STEP_S)}"
    if not gaps:
        first_s = _measure_first_step(facts)
        return max(MAX_SECOND_DELAY * first_s, MAX_FIRST_STEP_S), f"the first one took {format_duration(first_s)}"
    usual = f"they took {format_duration(median(gaps))} before"
    if len(gaps) < MIN_STEP_GAPS:
        return max(MAX_EARLY_DELAY * median(gaps), MIN_EARLY_DELAY_S), usual
    return max(MAX_STEP_DELAY * median(gaps), MIN_STEP_DELAY_S), usual


def _measure_first_step(facts: HealthFacts) -> float:
    """Return the time from the start of the first job with a step to that step."""
    first = next(iter(facts.progress.steps.values()))
    started_at = facts.progress.jobs[first.job].started_at
    return first.time - (started_at if started_at is not None else first.time)


def _explain_late_step(facts: HealthFacts, *, since: float) -> str:
    """Return the likely cause of a step that is not made, by the first role that has made nothing for it."""
    progress = facts.progress
    failing = _list_untrained(facts)
    if any(_find_full_disk(facts)):
        return "the disk is full"
    if failing and failing == set(progress.domains):
        return "all episodes or rewards fail, so there is nothing to train on"
    if any(event.time > since for _, event in progress.flat_dropped):
        return "the trainer drops groups that have one reward for all their episodes, and waits for others"
    if progress.steps:
        return "a worker hangs, or no trajectories arrive"
    roles = {worker.role for worker in _newest_workers(facts) if worker.is_up}
    if "train" not in roles:
        return "the trainer is not up"
    if "env" not in roles:
        return "no env worker is up" if "decode" in roles else "the trainer hangs, or no other role is up"
    if not any(domain.num_ended or domain.num for domain in progress.domains.values()):
        return "no episode has ended: engines or environments hang, or take long to start"
    if not any(domain.num for domain in progress.domains.values()):
        return "episodes end, but none has a reward yet: the reward function or its workers hang"
    return "episodes have rewards: the trainer hangs, or waits for whole groups whose last episodes take long"


def _find_old_checkpoint(facts: HealthFacts) -> Iterator[Advisory]:
    """Find a running campaign that would lose much work now: no checkpoint for long, though steps are made."""
    progress = facts.progress
    if not facts.is_running or not progress.steps or any(_find_late_step(facts)):
        return
    saved = progress.checkpoint_times
    started_at = [job.started_at for job in progress.jobs.values() if job.started_at is not None]
    since = max([*saved[-1:], *started_at[-1:]], default=facts.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(saved)]
    if gaps:
        usual_s = median(gaps[-RECENT_STEPS:])
    else:
        usual_s = (facts.checkpoint_every or 0) * median(_list_step_gaps(facts) or [_measure_first_step(facts)])
    limit_s = max(MAX_CHECKPOINT_AGE * usual_s, MIN_CHECKPOINT_AGE_S)
    if facts.now - since > limit_s:
        yield Advisory(
            name="no-checkpoint",
            severity="warning",
            subject="train",
            text=f"no checkpoint for {format_duration(facts.now - since)}",
            figure=facts.now - since,
            threshold=limit_s,
            unit="s",
            cause="train.checkpoint_every_steps is too large, or checkpoints cannot be written",
            remedy="lower train.checkpoint_every_steps, and check the space and quota of the campaign's directory",
        )


def _list_step_gaps(facts: HealthFacts) -> list[float]:
    """Return the times from one of the recent steps to the next, without those between jobs."""
    steps = facts.steps[-RECENT_STEPS - 1 :]
    return [later.time - earlier.time for earlier, later in itertools.pairwise(steps) if later.job == earlier.job]


def _find_failing_workers(facts: HealthFacts) -> Iterator[Advisory]:
    """Find workers that fail again and again: in the last hour, or the one before the last failure of an ended job.

    Workers that were lost at once count once, and a large role may lose some; one worker that fails again does not.
    """
    job = _newest_job(facts)
    for (number, role), failures in sorted(facts.progress.last_worker_failures.items()):
        end = facts.now if facts.is_running else max(failure.time for failure in failures)
        recent = [failure for failure in failures if failure.time > end - WORKER_FAILURES_S]
        if number != job or not recent:
            continue
        num_workers = sum(worker.role == role for worker in _newest_workers(facts))
        num_incidents = _count_incidents(failure.time for failure in recent)
        counts = _count_failures(recent)
        num_of_one = max(counts.values())
        allowed = num_workers // WORKERS_PER_FAILURE
        num = max(num_incidents - allowed, num_of_one)
        if num < MIN_WORKER_FAILURES:
            continue
        cause = facts.progress.worker_failure_reasons.get(role) or "see their logs"
        remedy = f"read the log of role {role}, and the failures by node: one bad node is excluded"
        if names_full_disk(cause):
            remedy = "make room in the campaign's file system (`hpcrl gc` names what can go), or raise the quota"
        is_one = num_of_one >= num_incidents - allowed
        figure = num_of_one if is_one else num_incidents
        num_failures = sum(counts.values())
        what = f"{role} workers failed {num_failures} times"
        how = "" if num_failures == figure else f", one of them {figure}" if is_one else f", at {figure} times"
        yield Advisory(
            name="workers-die",
            severity="critical" if num >= MANY_WORKER_FAILURES else "warning",
            subject=role,
            text=f"{what} in {'the last' if facts.is_running else 'an'} hour{how}",
            figure=figure,
            threshold=MIN_WORKER_FAILURES + (0 if is_one else allowed),
            unit="failures",
            cause=cause,
            remedy=remedy,
        )


def _count_failures(failures: Iterable[WorkerFailure]) -> dict[str, int]:
    """Return how often each worker failed, by the one of those who report it that did so most often."""
    counts: dict[str, int] = {}
    for (worker, _), num in Counter((failure.worker, failure.reporter) for failure in failures).items():
        counts[worker] = max(num, counts.get(worker, 0))
    return counts


def _count_incidents(times: Iterable[float]) -> int:
    """Return how often workers failed, where those that failed within a minute count once."""
    num, since = 0, -math.inf
    for time in sorted(times):
        if time >= since + INCIDENT_S:
            num, since = num + 1, time
    return num


def _find_lost_memory(facts: HealthFacts) -> Iterator[Advisory]:
    shortage = facts.progress.shortage
    if shortage is not None:
        yield Advisory(
            name="memory-short",
            severity="notice",
            subject="train",
            text=f"the trainer ran out of memory at step {shortage.step} and continues with smaller micro-batches",
            figure=shortage.num_tokens,
            threshold=shortage.tokens_per_micro_batch or 0,
            unit="tokens a micro-batch",
            cause="a micro-batch or a row is too large for the device",
            remedy="lower train.tokens_per_micro_batch, or shard over more ranks",
        )


def _newest_job(facts: HealthFacts) -> int:
    return max(facts.progress.jobs, default=0)


def _newest_workers(facts: HealthFacts) -> Iterable[WorkerProgress]:
    jobs = facts.progress.jobs
    return jobs[_newest_job(facts)].workers.values() if jobs else ()


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _noise(first: Sequence[float], last: Sequence[float], *, num_errors: float = NUM_ERRORS) -> float:
    """Return the change of a mean that is within the noise of the values.

    Values that resemble those before them count for less than independent ones.
    """
    parts = [part for part in (first, last) if len(part) > 1]
    error = math.sqrt(sum(stdev(part) ** 2 / len(part) for part in parts))
    likeness = _measure_likeness(parts)
    return num_errors * error * math.sqrt((1 + likeness) / (1 - likeness))


def _measure_likeness(parts: Iterable[Sequence[float]]) -> float:
    """Return the correlation of values with those before them, from 0 to MAX_LIKENESS."""
    products = squares = 0.0
    for part in parts:
        mean = fmean(part)
        rest = [value - mean for value in part]
        products += sum(before * after for before, after in itertools.pairwise(rest))
        squares += sum(value * value for value in rest)
    return min(max(products / squares, 0.0), MAX_LIKENESS) if squares else 0.0


RULES: tuple[Callable[[HealthFacts], Iterator[Advisory]], ...] = (
    _find_failing_domains,
    _find_env_faults,
    _find_truncation,
    _find_stale_episodes,
    _find_reward_trend,
    _find_flat_groups,
    _find_mismatch,
    _find_bad_gradients,
    _find_broken_figures,
    _find_skipped_steps,
    _find_low_entropy,
    _find_starving_trainer,
    _find_idle_engines,
    _find_full_disk,
    _find_late_step,
    _find_old_checkpoint,
    _find_failing_workers,
    _find_lost_memory,
)
