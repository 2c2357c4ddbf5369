"""Reporting of an env worker's episodes: events with counts about once a second, and each fault when it happens.

CountingPolicy     a router that counts turns and tokens of training; those of evaluations are not counted
LoopMeter          measures how busy the event loop is, and how long things wait for it
LoopFigures, describe_busy_loop    its figures, and what they mean
EpisodeReporter    counts endings, and emits counts, faults and pauses of domains
"""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from time import monotonic, thread_time
from typing import NamedTuple

import msgspec

from hpcrl.campaign_dir.events import CampaignEvent, EpisodesCounted, FaultReported, FaultSubject
from hpcrl.config.recipe import DomainConfig
from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, join_chunks
from hpcrl.hardware.loop_model import BUSY_LOOP_SHARE
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.routing.trajectories import with_ids
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.turn import StreamingGenerator
from hpcrl.spool.episode_lengths import LengthCounts, add_length
from hpcrl.spool.ids import is_held_out
from hpcrl.spool.outcome import name_outcome
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.rows import count_by_fate
from hpcrl.spool.status import EpisodeStatus

_log = logging.getLogger(__name__)
REPORT_INTERVAL_S, MAX_REPORT_INTERVAL_S = 1.0, 20.0
MAX_REPORTS_PER_S = 30
"""The reports of all env workers together: whoever watches reads them all, and they are kept."""
LOOP_WINDOW_S = 60.0
"""The time over which a loop has to be busy to be the limit."""


def find_report_interval(num_workers: int) -> float:
    """Return the seconds between two reports of one of these env workers."""
    return min(max(REPORT_INTERVAL_S, num_workers / MAX_REPORTS_PER_S), MAX_REPORT_INTERVAL_S)


class LoopFigures(NamedTuple):
    """The load of an event loop."""

    share: float
    """The share of a core that its thread used."""
    delay_s: float
    """The longest that a timer waited for it."""


class LoopMeter:
    """Measures the event loop of the thread that calls it, between two calls of `read`."""

    def __init__(self, *, clock: Callable[[], float] = monotonic, cpu_clock: Callable[[], float] = thread_time) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._started_at, self._cpu_s, self._delay_s = clock(), cpu_clock(), 0.0

    def note_delay(self, delay_s: float) -> None:
        """Note how late a timer was."""
        self._delay_s = max(self._delay_s, delay_s)

    def elapsed_s(self) -> float:
        """Return the time since the figures were last read."""
        return self._clock() - self._started_at

    def read(self) -> LoopFigures:
        """Return the figures since they were last read."""
        now, cpu_s = self._clock(), self._cpu_clock()
        figures = LoopFigures((cpu_s - self._cpu_s) / max(now - self._started_at, 1e-9), self._delay_s)
        self._started_at, self._cpu_s, self._delay_s = now, cpu_s, 0.0
        return figures


class CountingPolicy:
    """A policy with counters of what it has generated for training."""

    def __init__(self, policy: StreamingGenerator, *, on_turn: Callable[[str, Completion], None]) -> None:
        """Count the turns of `policy`; `on_turn(episode, completion)` is called after each turn of training."""
        self._policy = policy
        self._on_turn = on_turn
        self.num_turns = 0
        self.num_tokens = 0
        self.num_remote_prefills = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one turn."""
        with_its_ids = with_ids(request)
        completion = await self._policy.generate(with_its_ids)
        if not is_held_out(with_its_ids.domain):
            self.num_turns += 1
            self.num_tokens += len(completion.token_ids)
            self.num_remote_prefills += completion.remote_prefill
            self._on_turn(with_its_ids.trajectory, completion)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Stream one turn while it is generated."""
        with_its_ids = with_ids(request)
        is_counted = not is_held_out(with_its_ids.domain)
        self.num_turns += is_counted
        parts: list[CompletionChunk] = []
        try:
            async with contextlib.aclosing(self._policy.stream(with_its_ids)) as chunks:
                async for chunk in chunks:
                    self.num_tokens += len(chunk.token_ids) * is_counted
                    parts.append(chunk)
                    yield chunk
        finally:  # also if the caller has enough: its stop text was found
            if is_counted and parts:
                completion = join_chunks(parts)
                self.num_remote_prefills += completion.remote_prefill
                self._on_turn(with_its_ids.trajectory, completion)


class EpisodeReporter:
    """The counts and faults of one env worker's episodes of training."""

    def __init__(
        self,
        domains: Mapping[str, DomainConfig],
        *,
        groups: EpisodeGroups,
        policy: CountingPolicy,
        task_queue: TaskQueue,
        emit: Callable[[CampaignEvent], None],
        num_workers: int = 1,
    ) -> None:
        """Report what `emit` is called with; `num_workers` is the number of env workers."""
        self._domains = domains
        self._groups = groups
        self._policy = policy
        self._task_queue = task_queue
        self._emit = emit
        self._outcomes: dict[str, Counter[str]] = {}
        self._token_fates: dict[str, Counter[str]] = {}
        self._lengths: dict[str, LengthCounts] = {}
        self._num_faults: Counter[str] = Counter()
        """Faults by domain."""
        self._num_generated: Counter[str] = Counter()
        """Tokens by running episode."""
        self._reported: EpisodesCounted | None = None
        self._reported_at = 0.0
        self._num_workers = num_workers
        self._meter, self._window = LoopMeter(), LoopMeter()
        self._is_limit_reported = False

    def record_turn(self, episode: str, num_tokens: int) -> None:
        """Count the tokens of a turn, for the length of an episode that is cancelled."""
        self._num_generated[episode] += num_tokens

    def end_episode(self, trajectory: Trajectory, *, now: float) -> None:
        """Emit the fault of an episode that has ended; too many faults pause its domain for a while."""
        self._num_generated.pop(trajectory.id, None)
        fault = trajectory.extra.get("fault")
        if fault:  # an earlier attempt may have failed where the last one did not
            what: FaultSubject = "policy-fault" if trajectory.status == "policy-fault" else "env-fault"
            self._emit(FaultReported(what=what, detail=fault, id=trajectory.id, domain=trajectory.domain))
            self._log_fault(trajectory.domain, f"{what}: {trajectory.id}: {fault}")
        failed = trajectory.status == "env-fault"
        pause_s = self._task_queue.record_end(trajectory.domain, group=trajectory.group, fault=failed, now=now)
        if pause_s is not None:
            name = trajectory.domain
            why = f"too many faults (rollout.max_env_faults), the last: {fault}"
            detail = f"domains.{name} ({self._domains[name].env}) is paused for {pause_s:g} s: {why}"
            self._emit(FaultReported(what="env-paused", detail=detail, domain=name))

    def _log_fault(self, domain: str, text: str) -> None:
        """Write the 1st, 10th, 100th fault of a domain to the worker's log; the events have all."""
        self._num_faults[domain] += 1
        num = str(self._num_faults[domain])
        if num.rstrip("0") == "1":
            _log.warning("fault %s of domains.%s: %s", num, domain, text)

    def abort_episode(self, episode: str) -> None:
        """Count the length that a cancelled episode had."""
        add_length(self._lengths.setdefault("aborted-redundant", {}), self._num_generated.pop(episode, 0))

    def count_endings(self, endings: Iterable[tuple[Trajectory, EpisodeStatus]]) -> None:
        """Count endings by the status that the ledger has."""
        for trajectory, status in endings:
            outcome = trajectory.outcome if status == trajectory.status else ""
            self._outcomes.setdefault(trajectory.domain, Counter())[name_outcome(status, outcome)] += 1
            fates = count_by_fate(trajectory)
            self._token_fates.setdefault(trajectory.domain, Counter()).update(
                fates if status in TRAINABLE else {status: fates.total()}
            )
            add_length(self._lengths.setdefault(status, {}), fates.total())

    def note_delay(self, delay_s: float) -> None:
        """Note how late the event loop was, and report a loop that is the limit, once."""
        self._meter.note_delay(delay_s)
        self._window.note_delay(delay_s)
        if self._is_limit_reported or self._window.elapsed_s() < LOOP_WINDOW_S:
            return
        found = self._window.read()
        if found.share >= BUSY_LOOP_SHARE:
            self._is_limit_reported = True
            self._emit(FaultReported(what="env-loop", detail=describe_busy_loop(found, num_workers=self._num_workers)))

    def report_due(self, *, now: float) -> None:
        """Emit the counts if they have changed and the time has come."""
        if now - self._reported_at >= find_report_interval(self._num_workers):
            self.report()
            self._reported_at = now

    def report(self) -> None:
        """Emit the counts if they have changed."""
        counts = self._count()
        if counts != self._reported:
            loop = self._meter.read()
            share, delay_s = round(loop.share, 3), round(loop.delay_s, 3)
            self._emit(msgspec.structs.replace(counts, loop_share=share, loop_delay_s=delay_s))
            self._reported = counts

    def _count(self) -> EpisodesCounted:
        endings = self._groups.endings
        return EpisodesCounted(
            running=self._groups.num_running,
            done=endings["done"],
            truncated=endings["truncated"],
            aborted_stale=endings["aborted-stale"],
            aborted_redundant=endings["aborted-redundant"],
            env_fault=endings["env-fault"],
            policy_fault=endings["policy-fault"],
            num_tokens=self._policy.num_tokens,
            turns=self._policy.num_turns,
            remote_prefills=self._policy.num_remote_prefills,
            outcomes={name: dict(counter) for name, counter in self._outcomes.items()},
            token_fates={name: dict(counter) for name, counter in self._token_fates.items()},
            lengths={status: {**counts} for status, counts in self._lengths.items()},
        )


def describe_busy_loop(figures: LoopFigures, *, num_workers: int) -> str:
    """Return what a loop that is the limit means, and what helps."""
    return (
        f"the event loop of this env worker uses {figures.share:.0%} of a core, and calls wait up to "
        f"{figures.delay_s:.2g} s for it: set resources.env.num_workers = {2 * num_workers} or more (now {num_workers})"
    )
