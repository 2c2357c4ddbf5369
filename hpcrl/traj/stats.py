"""Show the figures of every domain, counted one trajectory at a time: `hpcrl traj stats`.

show_stats               prints them
count_by_domain          counts the trajectories of each domain
count_fates              counts the tokens of one by what became of them
DomainTally              the running counts of a domain
CampaignStats            the figures of all, which are JSON
DomainFigures            its figures; they consist of
ValueSpread, measure_spread    the distribution of a quantity
VersionReward, mean_reward_by_version    the mean reward of a version
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hpcrl.monitor.screen_parts import FittedTable
from hpcrl.spool.outcome import name_outcome
from hpcrl.spool.record import TRAINABLE, Trajectory, sum_phase_times
from hpcrl.spool.rows import count_by_fate, list_row_turns, list_spans
from hpcrl.spool.token_fates import MIN_TRAINED_SHARE, TRAINED, explain_untrained, measure_trained_share
from hpcrl.system.terminal import (
    LABEL_WIDTH,
    STATUS_STYLES,
    Sparkline,
    draw_time_bar,
    escape_to_one_line,
    format_duration,
    format_number,
    format_percent,
    make_console,
    print_json,
    show_wait,
)
from hpcrl.traj.history import TrajectoryHistory, TrajectorySelection
from hpcrl.traj.listing import describe_nothing

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
MAX_ROW_COST = 4.0
"""The tokens of rows for each stored one above which the cost of many rows is shown as a warning."""


class ValueSpread(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a quantity."""

    num: int
    mean: float
    std: float
    min: float
    p10: float
    p50: float
    p90: float
    max: float


class VersionReward(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of the episodes that started with one version."""

    version: int
    num: int
    reward_mean: float


class DomainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a domain."""

    domain: str
    num_trajectories: int
    by_status: dict[str, int]
    by_outcome: dict[str, int]
    num_tokens: int
    num_generated_tokens: int
    token_fates: dict[str, int]
    """The fate of the generated tokens: `trained`, or why they are not."""
    trained_share: float | None
    """The share that is trained, without the extra episodes of groups."""
    num_conversations: int
    num_row_tokens: int
    """The tokens of the conversations with a trained turn, each with what it shares: what the trainer computes."""
    teacher_gap: float | None
    """The mean of log-prob minus the teacher's, of the trained tokens that a teacher's engine has scored."""
    reward: ValueSpread | None
    """The rewards of the trajectories that have one."""
    tokens: ValueSpread | None
    turns: ValueSpread | None
    by_updates: dict[int, int]
    """The number of trajectories by the versions between the start and the end of the episode."""
    generate_s: float
    step_s: float
    reset_s: float
    """Sums over all trajectories."""
    by_version: list[VersionReward]


class CampaignStats(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all domains, as `stats --json` prints them."""

    campaign: str
    domains: list[DomainFigures]


@dataclass
class DomainTally:
    """The running counts of a domain: eight bytes per trajectory and quantity with quantiles."""

    by_status: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)
    by_updates: Counter[int] = field(default_factory=Counter)
    token_fates: Counter[str] = field(default_factory=Counter)
    num_conversations: int = 0
    num_row_tokens: int = 0
    num_taught_tokens: int = 0
    teacher_gap_sum: float = 0.0
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    turns: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("generate", "step", "reset"), 0.0))
    versions: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        self.by_status[trajectory.status] += 1
        self.by_outcome[name_outcome(trajectory.status, trajectory.outcome)] += 1
        self.by_updates[trajectory.end_version - trajectory.start_version] += 1
        self.tokens.append(len(trajectory))
        self.turns.append(len(trajectory.turns))
        self.token_fates.update(count_fates(trajectory))
        self.num_conversations += len(trajectory.rows) or 1
        for span, own in zip(list_spans(trajectory), list_row_turns(trajectory), strict=True):
            if any(not trajectory.turns[number].masked for number in own):
                self.num_row_tokens += span.num_tokens
        if trajectory.teacher_logprobs is not None:
            is_taught = trajectory.loss_mask & ~np.isnan(trajectory.teacher_logprobs)
            gaps = trajectory.logprobs[is_taught].astype(np.float64) - trajectory.teacher_logprobs[is_taught]
            self.num_taught_tokens += len(gaps)
            self.teacher_gap_sum += float(gaps.sum())
        for phase, seconds in sum_phase_times(trajectory).items():
            self.seconds[phase] += seconds
        if trajectory.reward is not None and math.isfinite(trajectory.reward):
            self.rewards.append(trajectory.reward)
            num, total = self.versions.get(trajectory.start_version, (0, 0.0))
            self.versions[trajectory.start_version] = (num + 1, total + trajectory.reward)

    def figures(self, domain: str) -> DomainFigures:
        return DomainFigures(
            domain=domain,
            num_trajectories=len(self.tokens),
            by_status=dict(self.by_status.most_common()),
            by_outcome=dict(self.by_outcome.most_common()),
            num_tokens=int(sum(self.tokens)),
            num_generated_tokens=self.token_fates.total(),
            token_fates=dict(self.token_fates.most_common()),
            trained_share=measure_trained_share(self.token_fates),
            num_conversations=self.num_conversations,
            num_row_tokens=self.num_row_tokens,
            teacher_gap=self.teacher_gap_sum / self.num_taught_tokens if self.num_taught_tokens else None,
            reward=measure_spread(self.rewards),
            tokens=measure_spread(self.tokens),
            turns=measure_spread(self.turns),
            by_updates=dict(sorted(self.by_updates.items())),
            generate_s=self.seconds["generate"],
            step_s=self.seconds["step"],
            reset_s=self.seconds["reset"],
            by_version=mean_reward_by_version(self.versions),
        )


def count_fates(trajectory: Trajectory) -> Counter[str]:
    """Count the generated tokens of a trajectory by what became of them."""
    fates = count_by_fate(trajectory)
    if trajectory.status not in TRAINABLE:
        return Counter({trajectory.status: fates.total()})
    # A record of the first schema has turns that are masked without a reason: they were sampled otherwise.
    num_masked = fates[TRAINED] - sum(
        int(trajectory.loss_mask[turn.start : turn.end].sum()) for turn in trajectory.turns if not turn.masked
    )
    return fates - Counter({TRAINED: num_masked}) + Counter({"sampling": num_masked})


def measure_spread(values: Sequence[float]) -> ValueSpread | None:
    """Measure the distribution of values; None without values."""
    if not values:
        return None
    column = np.asarray(values, np.float64)
    low, p10, p50, p90, high = (float(one) for one in np.quantile(column, QUANTILES))
    mean, std = float(column.mean()), float(column.std())
    return ValueSpread(num=len(column), mean=mean, std=std, min=low, p10=p10, p50=p50, p90=p90, max=high)


def mean_reward_by_version(sums: Mapping[int, tuple[int, float]]) -> list[VersionReward]:
    return [
        VersionReward(version=version, num=num, reward_mean=total / num)
        for version, (num, total) in sorted(sums.items())
    ]


SPREAD_COLUMNS = ("mean", "std", "min", "p10", "p50", "p90", "max")


def count_by_domain(history: TrajectoryHistory, selection: TrajectorySelection) -> list[DomainFigures]:
    """Return the figures of each domain, sorted by name."""
    tallies: dict[str, DomainTally] = {}
    for _, trajectory in history.trajectories(selection):
        tallies.setdefault(trajectory.domain, DomainTally()).add(trajectory)
    return [tallies[domain].figures(domain) for domain in sorted(tallies)]


def show_stats(history: TrajectoryHistory, selection: TrajectorySelection, *, as_json: bool) -> int:
    """Print the figures of every domain."""
    with show_wait("the trajectories are read"):
        domains = count_by_domain(history, selection)
    if as_json:
        print_json(CampaignStats(campaign=history.campaign.name, domains=domains))
        return 0
    console = make_console(pipe_width=100)
    if not domains:
        console.print(describe_nothing(history.campaign, selection), style="dim", highlight=False, soft_wrap=True)
    for index, figures in enumerate(domains):
        if index:
            console.print()
        _print_domain(console, figures)
    return 0


def _print_domain(console: Console, figures: DomainFigures) -> None:
    num = f"{figures.num_trajectories:,} {'trajectory' if figures.num_trajectories == 1 else 'trajectories'}"
    console.print(Text.assemble((escape_to_one_line(figures.domain), "bold"), f"   {num}"))
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for name, value in _iter_stat_lines(figures, ascii_only=console.options.ascii_only):
        grid.add_row(Text(name, style="dim"), value)
    console.print(grid)
    console.print(_build_spread_table(figures))


def _iter_stat_lines(figures: DomainFigures, *, ascii_only: bool) -> Iterator[tuple[str, RenderableType]]:
    yield "status", _format_statuses(figures)
    if set(figures.by_outcome) - {"finished"}:
        yield "outcome", Text("   ".join(f"{name} {num:,}" for name, num in figures.by_outcome.items()))
    generated_share = figures.num_generated_tokens / figures.num_tokens if figures.num_tokens else 0.0
    yield "tokens", Text(f"{figures.num_tokens:,}, of which the model generated {format_percent(generated_share)}")
    if figures.num_conversations > figures.num_trajectories:
        mean = figures.num_conversations / figures.num_trajectories
        line = Text(f"{figures.num_conversations:,} conversations, {mean:.1f} an episode")
        cost = figures.num_row_tokens / max(figures.num_tokens, 1)
        style = "bold yellow" if cost > MAX_ROW_COST else ""
        yield "rows", line.append(f"; the trainer computes {cost:.1f} tokens for each that is stored", style=style)
    if figures.trained_share is not None:
        yield "trained", _format_trained(figures.trained_share, figures.token_fates)
    if figures.teacher_gap is not None:
        yield "teacher", Text(f"{figures.teacher_gap:+.4f} a trained token: log-prob minus that of the teacher")
    yield "updates", _format_updates(figures)
    times = [("generate", figures.generate_s), ("step", figures.step_s), ("reset", figures.reset_s)]
    mean_episode_s = sum(seconds for _, seconds in times) / figures.num_trajectories
    yield (
        "time",
        Text(f"{format_duration(mean_episode_s)} each ") + draw_time_bar(times, width=15, ascii_only=ascii_only),
    )
    if len(figures.by_version) > 1:
        first, last = figures.by_version[0], figures.by_version[-1]
        yield "trend", Sparkline([one.reward_mean for one in figures.by_version])
        ends = [f"{format_number(one.reward_mean)} with version {one.version}" for one in (first, last)]
        yield "", Text(f"mean reward {ends[0]}, {ends[1]}", style="dim")


def _format_trained(share: float, fates: Mapping[str, int]) -> Text:
    """Format the share of the generated tokens that is trained, and why the rest is not."""
    reasons = explain_untrained(fates)
    style = "bold yellow" if share < MIN_TRAINED_SHARE else ""
    text = Text(f"{share:.1%} of the tokens of kept episodes, before the trainer drops any", style=style)
    return text.append(f"; {reasons}" if reasons else "")


def _format_statuses(figures: DomainFigures) -> Text:
    line = Text()
    for status, num in figures.by_status.items():
        line.append(status, style=STATUS_STYLES[status]).append(f" {num:,}   ")
    return line


def _format_updates(figures: DomainFigures) -> Text:
    """Format the shares of episodes by the versions between their start and their end."""
    total = figures.num_trajectories
    shares = [f"{updates}: {format_percent(num / total)}" for updates, num in list(figures.by_updates.items())[:6]]
    return Text("   ".join(shares) + ("   ..." if len(figures.by_updates) > 6 else ""))


def _build_spread_table(figures: DomainFigures) -> FittedTable:
    rows = []
    for name, spread in (("reward", figures.reward), ("tokens", figures.tokens), ("turns", figures.turns)):
        row = {"": f"{name:<{LABEL_WIDTH - 1}}"}
        for of in SPREAD_COLUMNS:
            cell = _format_spread_cell(getattr(spread, of), statistic=of, name=name) if spread else "-"
            row[of] = f"{cell:>6}"
        rows.append(row)
    return FittedTable(rows, texts=("",), numbers=SPREAD_COLUMNS, styles=[{"": "dim"}] * len(rows))


def _format_spread_cell(value: float, *, statistic: str, name: str) -> str:
    """Format rewards with two digits, means and deviations of counts with one."""
    if name == "reward":
        return format_number(value)
    return f"{value:,.1f}" if statistic in ("mean", "std") else f"{value:,.0f}"
