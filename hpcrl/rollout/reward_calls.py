"""Compute the scores of segments, in children that are killed when a call hangs; `reward_process` starts it.

    main          serve a worker: paths of segments come in, a score for each of their trajectories goes out
    RewardLane    the calls of one domain, or of the teacher, and the children that run them
    RewardChild   a forked process that runs reward calls
    RewardCall    a call, with one trajectory or several
    GROWTH_INTERVAL_S, BUSY_INTERVAL_S, MAX_USUAL_S, IDLE_S, ASYNC_GRACE_S, MAX_OUTAGES  limits

A plain function has a child for each call under way: there are few at first, and double that whenever none has
answered for GROWTH_INTERVAL_S and cores are free. An async function has one child with many calls. When a child ends or
is killed, the calls that it had are repeated, each trajectory in a separate child: so one that hangs costs itself
only. The children read the trajectories themselves; this process, which has the code, has one thread and may fork.
Calls of a domain with judges wait while one of these is gone, and are repeated if they failed while it was.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import DomainConfig
from hpcrl.errors import SpoolError
from hpcrl.plan.records import read_recipe
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.rollout.reward_process import SegmentScores
from hpcrl.rollout.rewards import (
    RewardCaller,
    RewardScore,
    describe_reward_error,
    describe_timeout,
    load_reward,
    needs_score,
)
from hpcrl.spool.record import TRAINABLE
from hpcrl.spool.segment import Segment, read_segment
from hpcrl.system.exit_codes import describe_end
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants, prefer_to_die

GROWTH_INTERVAL_S, BUSY_INTERVAL_S = 0.02, 0.25
MAX_USUAL_S = 5.0
IDLE_S = 5.0
"""Children are ended after this time without calls."""
ASYNC_GRACE_S = 2.0
"""An async function that does not react to its cancellation is killed after this time."""
MAX_OUTAGES = 3
"""The times that a call is repeated which failed while a judge was gone; it may be what ends the judge."""
OUTAGE_INTERVAL_S = 0.2
MAX_OPEN_SEGMENTS = 8
TEACHER_LANE = "[teacher]"
"""The name of the lane whose calls ask a teacher's engine; no domain can have it."""


class RewardCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a reward function: with one trajectory of a segment, or with several if it takes a list."""

    segment: str
    indices: list[int]
    is_repeated: bool = False
    """True if it must have a separate child."""
    num_outages: int = 0
    """The times that it has failed while a judge of its domain was gone."""


class _CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    call: RewardCall


class _CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    scores: list[RewardScore]
    has_failed: bool = False
    """True if the call as a whole failed."""


@dataclass
class RewardChild:
    """A forked process that runs reward calls."""

    pid: int
    connection: Connection
    max_calls: int
    calls: dict[int, tuple[RewardCall, float]] = field(default_factory=dict)
    """The calls under way by number, each with the time of its start."""


@dataclass
class RewardLane:
    """The calls of one domain or of the teacher, and the children that run them."""

    name: str
    caller: RewardCaller
    judges: Sequence[str]
    """The judges that its calls need."""
    timeout_s: float
    timeout_setting: str = "reward_timeout_s"
    queue: "deque[RewardCall]" = field(default_factory=deque)
    children: list[RewardChild] = field(default_factory=list)
    max_children: int = 1
    """The number of children that plain calls may have now."""
    last_change: float = 0.0
    """The time of its last answer, growth, or look at the cores."""
    last_call: int = 0
    """The number of the call that it started last."""
    num_answers: int = 0
    answered_s: float = 0.0
    """The time that all answered calls took together."""

    @property
    def limit_s(self) -> float:
        """Return the time after which the child of a call is killed."""
        return self.timeout_s + (ASYNC_GRACE_S if self.caller.is_async else 0.0)

    @property
    def usual_s(self) -> float:
        """Return a time within which calls are usually answered; one that takes longer is stuck."""
        if not self.num_answers:
            return min(MAX_USUAL_S, self.timeout_s / 4)
        return min(max(1.0, 10 * self.answered_s / self.num_answers), self.timeout_s / 4)

    @property
    def timeout_score(self) -> RewardScore:
        """Return the score of a call that took too long."""
        return describe_timeout(self.timeout_s, setting=self.timeout_setting)

    @property
    def num_running(self) -> int:
        return sum(len(child.calls) for child in self.children)


@dataclass
class _SegmentWork:
    """A segment that is being scored."""

    scores: dict[str, list[RewardScore | None]]
    """The scores of the teacher, by TEACHER_LANE, and of reward functions, by ""."""
    num_left: int


def main(campaign: Path, *, concurrency: int, num_cpus: int, teacher: str, fd: int) -> int:
    """Serve the worker until it closes the connection."""
    adopt_orphans()
    campaign_dir = CampaignDir(campaign)
    recipe = read_recipe(campaign_dir)
    lanes = {
        name: RewardLane(
            name,
            caller=load_reward(name, domain, model=campaign_dir.model),
            judges=domain.judges,
            timeout_s=domain.reward_timeout_s,
        )
        for name, domain in recipe.domains.items()
    }
    if teacher:
        from hpcrl.rollout.teacher_scores import make_teacher_caller  # a third of all imports

        assert recipe.teacher is not None
        lanes[TEACHER_LANE] = RewardLane(
            TEACHER_LANE,
            caller=make_teacher_caller(teacher),
            judges=[teacher],
            timeout_s=recipe.teacher.timeout_s,
            timeout_setting="teacher.timeout_s",
        )
    server = _RewardServer(
        socket.socket(fileno=fd), lanes, domains=recipe.domains, concurrency=concurrency, num_cpus=num_cpus
    )
    try:
        server.run()
    finally:
        end_descendants(grace_s=0.0)
    return 0


class _RewardServer:
    """The loop of the process: calls to children, answers to the worker."""

    def __init__(
        self,
        connection: socket.socket,
        lanes: dict[str, RewardLane],
        *,
        domains: Mapping[str, DomainConfig],
        concurrency: int,
        num_cpus: int,
    ) -> None:
        self._outages = JudgeOutages.from_environment()
        self._connection = connection
        self._lanes = lanes
        self._domains = domains
        self._concurrency = concurrency
        self._num_cpus = num_cpus
        self._received = b""
        self._segments: dict[str, _SegmentWork] = {}
        self._num_calls = 0
        self._ended: dict[int, int] = {}
        """The exit codes of children reaped since the last round."""

    def run(self) -> None:
        while True:
            self._dispatch()
            children = {child.connection: (lane, child) for lane in self._lanes.values() for child in lane.children}
            ready = wait([self._connection, *children], self._pause_s())
            if self._connection in ready and not self._receive_requests():
                return
            for connection in ready:
                if connection in children:
                    self._receive_answer(*children[connection])
            self._kill_overdue()
            self._adapt_children()
            self._ended.clear()
            self._reap_children()

    def _receive_requests(self) -> bool:
        """Receive paths of segments; return False once the worker has closed the connection."""
        data = self._connection.recv(1 << 16)
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._start_segment(msgspec.json.decode(line, type=str))
        return bool(data)

    def _start_segment(self, path: str) -> None:
        try:
            segment = _open_segment(path)
            facts = list(segment.facts)
        except SpoolError as error:
            self._send(SegmentScores(segment=path, error=str(error)))
            return
        by_lane: dict[str, list[int]] = {}
        for index, one in enumerate(facts):
            if one.domain in self._domains and needs_score(one, self._domains[one.domain]):
                by_lane.setdefault(one.domain, []).append(index)
            if one.domain in self._domains and TEACHER_LANE in self._lanes and one.status in TRAINABLE:
                by_lane.setdefault(TEACHER_LANE, []).append(index)
        scores: dict[str, list[RewardScore | None]] = {kind: [None] * len(facts) for kind in ("", TEACHER_LANE)}
        self._segments[path] = _SegmentWork(scores, sum(map(len, by_lane.values())))
        for name, indices in by_lane.items():
            lane = self._lanes[name]
            parts = [indices] if lane.caller.takes_list else [[index] for index in indices]
            lane.queue.extend(RewardCall(segment=path, indices=part) for part in parts)
        if not by_lane:
            self._send_scores(path)

    def _settle(self, lane: RewardLane, call: RewardCall, scores: list[RewardScore]) -> None:
        """Keep the scores of a call, and send those of its segment once they are complete."""
        work = self._segments[call.segment]
        kept = work.scores[TEACHER_LANE if lane.name == TEACHER_LANE else ""]
        for index, score in zip(call.indices, scores, strict=True):
            kept[index] = score
        work.num_left -= len(call.indices)
        if not work.num_left:
            self._send_scores(call.segment)

    def _send_scores(self, path: str) -> None:
        scores = self._segments.pop(path).scores
        teacher = scores[TEACHER_LANE] if TEACHER_LANE in self._lanes else []
        self._send(SegmentScores(segment=path, scores=scores[""], teacher=teacher))

    def _send(self, answer: SegmentScores) -> None:
        with contextlib.suppress(OSError):  # the worker has ended: the next read ends this process
            self._connection.sendall(msgspec.json.encode(answer) + b"\n")

    def _dispatch(self) -> None:
        """Give calls to children that have room, and to new ones where there may be more.

        The lane with the fewest calls under way is first, and among those the one that has waited longest for its turn:
        a slow domain does not keep the calls of others waiting.
        """
        room = self._concurrency - sum(lane.num_running for lane in self._lanes.values())
        lanes = [lane for lane in self._lanes.values() if lane.queue and not self._must_wait(lane)]
        while lanes and room > 0:
            lane = min(lanes, key=lambda lane: (lane.num_running, lane.last_call))
            if (child := self._find_child(lane, lane.queue[0])) is not None:
                self._start_call(lane, child, lane.queue.popleft())
                room -= 1
            if child is None or not lane.queue:
                lanes.remove(lane)

    def _must_wait(self, lane: RewardLane) -> bool:
        """Return whether a judge that a lane's calls need is gone."""
        return self._outages is not None and bool(self._outages.find_gone(lane.judges))

    def _find_child(self, lane: RewardLane, call: RewardCall) -> RewardChild | None:
        """Return a child for a call, a new one if need be; None if it must wait."""
        wide = lane.caller.is_async and not call.is_repeated
        for child in lane.children:
            if len(child.calls) < child.max_calls and (child.max_calls > 1) == wide:
                return child
        num_alike = sum((child.max_calls > 1) == wide for child in lane.children)
        if num_alike >= (1 if wide else lane.max_children):
            return None
        child = _fork_child(lane, max_calls=max(self._concurrency, 2) if wide else 1, worker=self._connection)
        lane.children.append(child)
        lane.last_change = time.monotonic()
        return child

    def _start_call(self, lane: RewardLane, child: RewardChild, call: RewardCall) -> None:
        self._num_calls += 1
        child.calls[self._num_calls] = (call, time.monotonic())
        lane.last_call = self._num_calls
        with contextlib.suppress(OSError):  # it has ended, which is seen when it is read
            child.connection.send_bytes(msgspec.json.encode(_CallRequest(number=self._num_calls, call=call)))

    def _receive_answer(self, lane: RewardLane, child: RewardChild) -> None:
        try:
            answer = msgspec.json.decode(child.connection.recv_bytes(), type=_CallAnswer)
            call, started = child.calls.pop(answer.number)
        except (EOFError, OSError, KeyError, msgspec.MsgspecError):
            end = self._describe_end(child.pid)
            failure = RewardScore(error=f"its process {end}", is_infrastructure="SIGKILL" in end)
            self._drop_child(lane, child, failure)
            return
        lane.last_change = time.monotonic()
        lane.num_answers += 1
        lane.answered_s += lane.last_change - started
        if answer.has_failed and self._repeat_after_outage(lane, call, started, answer.scores[0]):
            return
        if answer.has_failed and len(call.indices) > 1:
            self._repeat(lane, [call])
        else:
            self._settle(lane, call, answer.scores)

    def _drop_child(self, lane: RewardLane, child: RewardChild, failure: RewardScore) -> None:
        """Kill a child; a call with one trajectory that it had alone has failed, others are repeated."""
        lane.children.remove(child)
        _kill_child(child)
        calls = [
            call
            for call, started in child.calls.values()
            if not self._repeat_after_outage(lane, call, started, failure)
        ]
        if len(calls) == 1 and len(calls[0].indices) == 1:
            self._settle(lane, calls[0], [failure])
        else:
            self._repeat(lane, calls)

    def _repeat_after_outage(self, lane: RewardLane, call: RewardCall, started: float, failure: RewardScore) -> bool:
        """Repeat a call that failed while a judge was gone, or give it up as a fault; return False if none was."""
        since = time.time() - (time.monotonic() - started)
        if self._outages is None or not self._outages.have_failed_since(lane.judges, since):
            return False
        if call.num_outages < MAX_OUTAGES:
            lane.queue.appendleft(msgspec.structs.replace(call, num_outages=call.num_outages + 1))
        elif len(call.indices) > 1:
            self._repeat(lane, [call])
        else:
            reason = f"{failure.error}; a judge failed or was gone, {MAX_OUTAGES + 1} times"
            self._settle(lane, call, [RewardScore(error=reason, is_infrastructure=True)])
        return True

    def _repeat(self, lane: RewardLane, calls: list[RewardCall]) -> None:
        lane.queue.extendleft(
            RewardCall(segment=call.segment, indices=[index], is_repeated=True)
            for call in reversed(calls)
            for index in reversed(call.indices)
        )

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for lane in self._lanes.values():
            for child in list(lane.children):
                if any(started + lane.limit_s < now for _, started in child.calls.values()):
                    self._drop_child(lane, child, lane.timeout_score)

    def _adapt_children(self) -> None:
        """Let lanes that wait for slow answers have more children; end those of lanes without calls."""
        now = time.monotonic()
        for lane in self._lanes.values():
            if not lane.children or now - lane.last_change < GROWTH_INTERVAL_S:
                continue
            if lane.queue and lane.max_children < self._concurrency:
                lane.last_change = now
                if count_busy_processes() - self._count_stuck(now) < self._num_cpus:
                    lane.max_children = min(2 * lane.max_children, self._concurrency)
                else:
                    lane.last_change += BUSY_INTERVAL_S
            elif not lane.queue and not lane.num_running and now - lane.last_change > IDLE_S:
                lane.max_children = 1
                for child in lane.children:
                    _kill_child(child)
                lane.children.clear()

    def _count_stuck(self, now: float) -> int:
        """Count the calls that take longer than is usual: a loop without end must not keep others waiting."""
        lanes = self._lanes.values()
        return sum(
            started + lane.usual_s < now
            for lane in lanes
            for child in lane.children
            for _, started in child.calls.values()
        )

    def _reap_children(self) -> None:
        """Reap all that have ended; also what they left behind, which this process adopts."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def _describe_end(self, pid: int) -> str:
        """Return how a child ended, which has closed its connection."""
        for _ in range(50):
            self._reap_children()
            if (code := self._ended.get(pid)) is not None:
                return describe_end(code)
            time.sleep(0.01)
        return "closed its connection"

    def _pause_s(self) -> float | None:
        """Return the time until there is something to do without an answer; None if nothing is under way."""
        lanes = [lane for lane in self._lanes.values() if lane.children]
        waiting = [lane for lane in self._lanes.values() if lane.queue and self._must_wait(lane)]
        if not lanes:
            return OUTAGE_INTERVAL_S if waiting else None
        if any(lane.queue and lane.max_children < self._concurrency and lane not in waiting for lane in lanes):
            return GROWTH_INTERVAL_S
        deadlines = [
            started + lane.limit_s for lane in lanes for child in lane.children for _, started in child.calls.values()
        ]
        idle_s = OUTAGE_INTERVAL_S if waiting else IDLE_S + 0.1
        return max(min([*deadlines, time.monotonic() + idle_s]) - time.monotonic(), 0.0) + 0.01


def count_busy_processes() -> int:
    """Count the descendants of this process that use or wait for a core."""
    busy = 0
    for pid in list_descendants():
        with contextlib.suppress(OSError, IndexError):
            busy += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    return busy


def _fork_child(lane: RewardLane, *, max_calls: int, worker: socket.socket) -> RewardChild:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            worker.close()
            _prepare_child()
            _serve_calls(lane, theirs)
            code = 0
        except BaseException:  # noqa: BLE001 - nothing of ours may run on in the child
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    theirs.close()
    return RewardChild(pid, ours, max_calls)


def _prepare_child() -> None:
    """Lead a session, which can be killed as a whole, and end with the process that forked this one."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    prefer_to_die()


def _serve_calls(lane: RewardLane, connection: Connection) -> None:
    if lane.caller.is_async:
        asyncio.run(_serve_async_calls(lane, connection))
        return
    for request in _receive_calls(connection):
        connection.send_bytes(msgspec.json.encode(_answer_call(lane.caller, request)))


def _receive_calls(connection: Connection) -> Iterator[_CallRequest]:
    with contextlib.suppress(EOFError):
        while True:
            yield msgspec.json.decode(connection.recv_bytes(), type=_CallRequest)


def _answer_call(caller: RewardCaller, request: _CallRequest) -> _CallAnswer:
    try:
        segment = _open_segment(request.call.segment)
        trajectories = [segment[index] for index in request.call.indices]
        scores = caller.read_scores(caller.call(trajectories), trajectories)
        return _CallAnswer(number=request.number, scores=scores)
    except BaseException as error:  # noqa: BLE001 - a user's reward may raise anything; one episode must not end a run
        return _fail_call(request, describe_reward_error(error))


async def _serve_async_calls(lane: RewardLane, connection: Connection) -> None:
    requests: asyncio.Queue[_CallRequest | None] = asyncio.Queue()

    def receive() -> None:
        try:
            requests.put_nowait(msgspec.json.decode(connection.recv_bytes(), type=_CallRequest))
        except EOFError:
            requests.put_nowait(None)

    asyncio.get_running_loop().add_reader(connection.fileno(), receive)
    under_way: set[asyncio.Task[None]] = set()
    while (request := await requests.get()) is not None:
        task = asyncio.create_task(_answer_async_call(lane, request, connection))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


async def _answer_async_call(lane: RewardLane, request: _CallRequest, connection: Connection) -> None:
    limit = asyncio.timeout(lane.timeout_s)
    try:
        segment = _open_segment(request.call.segment)
        trajectories = [segment[index] for index in request.call.indices]
        async with limit:
            value = await lane.caller.call(trajectories)
        answer = _CallAnswer(number=request.number, scores=lane.caller.read_scores(value, trajectories))
    except BaseException as error:  # noqa: BLE001 - a user's reward may raise anything; one episode must not end a run
        failure = lane.timeout_score if limit.expired() else describe_reward_error(error)
        answer = _fail_call(request, failure)
    connection.send_bytes(msgspec.json.encode(answer))


def _fail_call(request: _CallRequest, failure: RewardScore) -> _CallAnswer:
    return _CallAnswer(number=request.number, scores=[failure] * len(request.call.indices), has_failed=True)


@lru_cache(MAX_OPEN_SEGMENTS)
def _open_segment(path: str) -> Segment:
    return read_segment(Path(path))


def _kill_child(child: RewardChild) -> None:
    child.connection.close()
    for kill in (os.killpg, os.kill):  # a child that was forked just now may not lead its session yet
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    path, concurrency, num_cpus, teacher, fd = sys.argv[1:]
    sys.exit(main(Path(path), concurrency=int(concurrency), num_cpus=int(num_cpus), teacher=teacher, fd=int(fd)))
