"""The drain of one job: the request for it, the time that it may take, and when Slurm kills what is left.

JobDrain      the requests to end one job, and its drain once there is one
DrainLimits   the reason of a drain, and its times
ANSWER_SHARE, CLOCK_SKEW_S, COMPONENT_INTERVAL_S, END_QUERY_TIMEOUT_S, LIMITS_INTERVAL_S, MIN_CLOSE_GRACE_S,
NOTICE_INTERVAL_S   constants
"""

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from hpcrl.campaign_dir.events import CampaignEvent, DrainStarted
from hpcrl.campaign_dir.job_end import DrainNotice, EndCause
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.job.batch_log import note_in_log
from hpcrl.job.guardian import CLOSE_GRACE_S
from hpcrl.job.supervision import (
    SIGNAL_EARLY_S,
    CampaignUse,
    DrainMargin,
    DrainRequest,
    EndRequests,
    LookInterval,
    plan_termination,
)
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.slurm.end_policy import name_slurm_cause
from hpcrl.slurm.status import WAITING, query_lost_nodes
from hpcrl.system.files import publish_file

END_QUERY_TIMEOUT_S = 3.0
"""Time for Slurm to answer when a job that is about to end will end: there is little of it."""
LIMITS_INTERVAL_S = 5.0
COMPONENT_INTERVAL_S = 10.0
"""The time between two questions whether the jobs of components still run, where they are separate."""
NOTICE_INTERVAL_S = 0.5
ANSWER_SHARE = 0.7
"""The share of the time until SIGKILL for which a step waits for the drain of a driver that has answered."""
MIN_CLOSE_GRACE_S = 0.5
CLOCK_SKEW_S = 5.0
"""The most by which the clocks of nodes differ."""


@dataclass(frozen=True, kw_only=True)
class DrainLimits:
    """The reason of a drain, and its times; without a reason there is none yet."""

    reason: str | None = None
    cause: EndCause = "unknown"
    deadline: float = math.inf
    """The time when the workers should have drained, by the monotonic clock."""
    cut_at: float = math.inf
    """The time when those that have not are ended, by the monotonic clock."""
    kill_time: float = math.inf
    """The time when Slurm kills what is left, in seconds since the epoch, if it will."""

    def tighten(self, request: DrainRequest) -> "DrainLimits":
        """Return the limits after one more request: the first reason stays, and the earliest times."""
        is_first = self.reason is None
        return DrainLimits(
            reason=request.reason if is_first else self.reason,
            cause=request.cause if is_first else self.cause,
            deadline=min(self.deadline, time.monotonic() + request.grace_s),
            cut_at=min(self.cut_at, time.monotonic() + max(request.grace_s, request.longest_s)),
            kill_time=min(self.kill_time, request.kill_time),
        )


class JobDrain:
    """The requests to end one job, and its drain once there is one."""

    def __init__(
        self, job: JobDir, *, margin: DrainMargin, use: CampaignUse, emit: Callable[[CampaignEvent], object]
    ) -> None:
        """Take the time that the job needs to drain, and what the campaign has used of its limits."""
        self.requests = EndRequests(job.campaign.stop, job.terminated)
        self.limits = DrainLimits()
        self.has_schedule = False
        """True once Slurm has named the end after SIGTERM."""
        self.schedule_looks = LookInterval(END_QUERY_TIMEOUT_S)
        self._job, self._margin, self._use, self._emit = job, margin, use, emit
        self._started_at, self._started_turn = time.time(), time.monotonic()
        self._warned_end: tuple[float, EndCause] | None = None
        """The end that Slurm has named after a warning, and its cause."""
        self._moved_end: float | None = None
        """The end that Slurm names when that of the start is near: a suspension, or the site, may have moved it."""
        self._is_guess = False
        """True for a drain after a warning that Slurm has not explained yet."""
        self._limit_looks, self._notice_looks = LookInterval(LIMITS_INTERVAL_S), LookInterval(NOTICE_INTERVAL_S)
        self._component_looks = LookInterval(COMPONENT_INTERVAL_S)
        self._limits_before: DrainLimits | None = None
        """The limits before SIGTERM; None until SIGTERM was taken into account."""
        self._is_published = False
        self._terminated_at: float | None = None
        """The time when SIGTERM was taken into account; steps have been sent an answer to theirs since."""

    def answer_notices(self, kill_wait_s: float) -> None:
        """Answer, in a thread, the steps that report SIGTERM: without an answer in time they end.

        The loop of the driver may have to wait for Slurm, which is busy while it preempts.
        """
        threading.Thread(target=self._answer_notices, args=(kill_wait_s,), name="notices", daemon=True).start()

    def _answer_notices(self, kill_wait_s: float) -> None:
        while not self.requests.has_notice():
            time.sleep(NOTICE_INTERVAL_S)
        answer = DrainNotice(reason="a step received SIGTERM", end_s=ANSWER_SHARE * kill_wait_s, answers_sigterm=True)
        while True:
            try:
                publish_file(self._job.term_answer, msgspec.json.encode(answer))
            except OSError:
                time.sleep(NOTICE_INTERVAL_S)
            else:
                return

    def read_time(self) -> float:
        """Return the time since the epoch, by the clock as it was at the start: one that jumps ends no job."""
        return self._started_at + time.monotonic() - self._started_turn

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self.limits.cut_at

    def check_requests(self, allocation: JobAllocation) -> DrainRequest | None:
        """Drain the job if a user, Slurm or the clock asks for it, and return the first request but for SIGTERM.

        SIGTERM may also shorten the time of a drain.
        """
        if self._limits_before is None:
            if self._notice_looks.is_due() and self.requests.has_termination():
                self._limits_before = self.limits
                self._terminate(allocation, self._limits_before)
        elif not self.has_schedule and self.schedule_looks.is_due():
            self._terminate(allocation, self._limits_before)
        if self.limits.reason is not None:
            if self._is_guess:
                self._correct_guess(allocation)
            self.publish()
            return None
        request = self._find_request(allocation)
        if request is not None:
            if math.isinf(request.kill_time):  # the job has its walltime for the checkpoint
                left_s = self._read_end(allocation) - self.read_time() - CLOSE_GRACE_S
                request = replace(request, longest_s=left_s)
            self._is_guess = request.cause == "unknown"
            self.start(request)
        return request

    def start(self, request: DrainRequest) -> None:
        """Drain, or shorten a drain."""
        before, self.limits = self.limits, self.limits.tighten(request)
        self._is_published = self._is_published and self.limits.deadline == before.deadline
        self.publish()
        self._emit(DrainStarted(reason=request.reason, grace_s=request.grace_s))

    def publish(self, reason: str = "") -> None:
        """Ask all workers to drain, by default for `reason`.

        Where the file system refuses that now, the next turn tries again.
        """
        if self._is_published:
            return
        left_s, kill_s = self.limits.deadline - time.monotonic(), self.limits.kill_time - self.read_time()
        end_s = (left_s + kill_s) / 2  # what steps still have then is theirs: they remove what is on their nodes
        notice = DrainNotice(
            reason=self.limits.reason or reason,
            deadline=time.time() + left_s if math.isfinite(left_s) else None,
            left_s=left_s if math.isfinite(left_s) else None,
            end_s=end_s if math.isfinite(end_s) else None,
            answers_sigterm=self._limits_before is not None,
        )
        try:
            publish_file(self._job.drain, msgspec.json.encode(notice))
        except OSError as error:
            note_in_log(f"hpcrl: {error}")
        else:
            self._is_published = True

    def choose_grace(self) -> float:
        """Return how long one part of the end may take: all of it must be over when Slurm kills the job."""
        return min(CLOSE_GRACE_S, max((self.limits.kill_time - self.read_time()) / 4, MIN_CLOSE_GRACE_S))

    def find_lost_nodes(self, allocation: JobAllocation) -> list[str]:
        """Return the nodes for which Slurm has ended the whole job, if it did: it reports them as down by now."""
        if self.limits.cause not in ("cancellation", "node-failure") or allocation.job_id is None:
            return []
        nodes = sorted({node for names in allocation.nodes for node in names})
        return query_lost_nodes(nodes, env=os.environ, timeout_s=min(END_QUERY_TIMEOUT_S, self.choose_grace()))

    def _terminate(self, allocation: JobAllocation, before: DrainLimits) -> None:
        """Drain after SIGTERM in the time that Slurm names, which may answer only when it is asked again."""
        is_first = self._terminated_at is None
        if before.reason is not None and is_first:  # steps wait for it, and Slurm may be slow
            self._is_published = False
            self.publish()
        if self._terminated_at is None:
            self._terminated_at = self.read_time()
        request = self._plan_termination(allocation, terminated_at=self._terminated_at)
        if roles := allocation.name_separate_job(self.requests.read_notice()):
            request = replace(request, reason=f"the job of {roles} received SIGTERM ({request.cause})")
        if is_first or self.has_schedule:
            self.limits = before
            self.start(request)

    def _correct_guess(self, allocation: JobAllocation) -> None:
        """Ask Slurm again for the end of a job that it has warned, and drain until then."""
        self._find_end_time(allocation)
        if self._warned_end is None:
            return
        self._is_guess = False
        if not self.requests.has_termination() and (request := self._find_request(allocation)) is not None:
            self.limits = DrainLimits()
            self.start(request)

    def _find_request(self, allocation: JobAllocation) -> DrainRequest | None:
        drain_s = self._margin.find_seconds()
        if self._limit_looks.is_due():
            limit = self._use.find_drain(now=self.read_time(), job_start=self._started_at, drain_s=drain_s)
            if limit is not None:
                return limit
        if allocation.separate_jobs and self._component_looks.is_due():
            ended = allocation.find_ended_component(timeout_s=END_QUERY_TIMEOUT_S)
            if ended is not None:
                return self._plan_component_loss(*ended, drain_s=drain_s, allocation=allocation)
        self._confirm_end(allocation, drain_s=drain_s)
        now, end_time, kill_wait_s = self.read_time(), self._find_end_time(allocation), allocation.kill_wait_s
        request = self.requests.find_drain(now=now, end_time=end_time, drain_s=drain_s, kill_wait_s=kill_wait_s)
        if request is None or not request.is_at_walltime:
            return request
        if self._warned_end is not None and self._warned_end[1] == "preemption":
            return replace(request, reason="it is preempted", cause="preemption", kill_time=self._warned_end[0])
        if self._warned_end is None and allocation.job_id is not None and end_time > now + drain_s + SIGNAL_EARLY_S:
            reason = "Slurm has warned that it will end, and does not answer when"
            kill_time = now + drain_s + kill_wait_s
            return DrainRequest(reason=reason, grace_s=drain_s, cause="unknown", kill_time=kill_time)
        return request

    def _plan_component_loss(
        self, index: int, state: str, *, drain_s: float, allocation: JobAllocation
    ) -> DrainRequest:
        """Return how to drain after the job of a component has ended, or was queued again by Slurm."""
        lost = query_lost_nodes(allocation.nodes[index], env=os.environ, timeout_s=END_QUERY_TIMEOUT_S)
        cause = "node-failure" if lost else name_slurm_cause("preempted" if state in WAITING else state)
        return DrainRequest(
            reason=f"the job of {allocation.separate_jobs[index].roles} has ended ({state})",
            grace_s=drain_s,
            cause="cancellation" if cause == "unknown" else cause,
            kill_time=self.read_time() + drain_s + allocation.kill_wait_s,
        )

    def _confirm_end(self, allocation: JobAllocation, *, drain_s: float) -> None:
        """Ask Slurm for the end of a job that is to drain for its walltime now."""
        end_time = self._read_end(allocation)
        if allocation.job_id is None or self.requests.is_near_end or self.read_time() + drain_s <= end_time:
            return
        schedule = allocation.query_schedule(timeout_s=END_QUERY_TIMEOUT_S)
        if schedule is not None and schedule.running_end is not None:
            self._moved_end = schedule.running_end

    def _read_end(self, allocation: JobAllocation) -> float:
        return allocation.end_time if self._moved_end is None else self._moved_end

    def _find_end_time(self, allocation: JobAllocation) -> float:
        """Return when the job ends; after a warning by Slurm's answer, since a preemption may be the reason."""
        if not self.requests.is_near_end or allocation.job_id is None:
            return self._read_end(allocation)
        if self._warned_end is None and self.schedule_looks.is_due():
            schedule = allocation.query_schedule(timeout_s=END_QUERY_TIMEOUT_S)
            if schedule is not None and schedule.running_end is not None:
                self._warned_end = schedule.running_end, "preemption" if schedule.is_preempted else "walltime"
        return self._read_end(allocation) if self._warned_end is None else self._warned_end[0]

    def _plan_termination(self, allocation: JobAllocation, *, terminated_at: float) -> DrainRequest:
        """Return how to drain after SIGTERM; on a machine without a scheduler no SIGKILL follows."""
        now, end = terminated_at, self._read_end(allocation)
        kill_wait_s, drain_s = allocation.kill_wait_s, self._margin.find_seconds()
        cause: EndCause = "walltime" if now >= end - CLOCK_SKEW_S else "cancellation"
        self.has_schedule = allocation.job_id is None
        if allocation.job_id is not None:
            schedule = allocation.query_schedule(timeout_s=min(END_QUERY_TIMEOUT_S, kill_wait_s / 3))
            self.has_schedule = schedule is not None
            end = (schedule.running_end if schedule is not None else None) or now
            now = self.read_time() if end > now else now
            if schedule is not None and schedule.is_preempted:
                cause = "preemption"
        request = plan_termination(end, now=now, drain_s=drain_s, kill_wait_s=kill_wait_s, cause=cause)
        return replace(request, grace_s=max(request.grace_s - (self.read_time() - now), MIN_CLOSE_GRACE_S))
