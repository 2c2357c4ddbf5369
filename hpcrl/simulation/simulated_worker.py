"""An env worker in simulated time (`SimulatedEnvWorker`): admission, groups, holds and routing are those of a real one.

EpisodeRun           an episode that runs
EnvWorkerLinks       what an env worker reaches of the campaign
SimulatedEnvWorker   the env worker
FaultSettings        how often environments and engines fail

It looks around when a real one does: at once when a group is full, has become durable, or a step has ended, otherwise
in its next round. Its hold is that of the last round, or of what has become durable since.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import ConfigTable, Recipe
from hpcrl.engines.base import GenerateRequest
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S
from hpcrl.roles.context import ROLE_ROUND_INTERVAL_S
from hpcrl.rollout.admission import AdmissionControl
from hpcrl.rollout.episode import retry_pause_s
from hpcrl.rollout.flow_control import InFlightVersions
from hpcrl.rollout.groups import EpisodeGroups, GroupOutcome
from hpcrl.rollout.routing.decision import RoutingDecision
from hpcrl.rollout.routing.room_queue import MAX_REFUSALS
from hpcrl.rollout.routing.trajectories import TrajectoryState
from hpcrl.rollout.tasks import AgentTask, TaskStream
from hpcrl.simulation.clock import EventQueue
from hpcrl.simulation.engine import EngineRow, FluidEngine
from hpcrl.simulation.turn_router import TurnRouter, count_tokens
from hpcrl.simulation.workload import EpisodeScript, EpisodeSource
from hpcrl.spool.ids import get_index
from hpcrl.spool.outcome import is_too_old
from hpcrl.spool.record import Trajectory
from hpcrl.spool.status import TRAINABLE, EpisodeStatus

FIRST_PAUSE_S = 1.0
ENGINE_PAUSE_S = 0.5
"""The time after which a turn is tried again that found no engine."""
LATE_INTERVAL_S = 1.0
_NO_TOKENS = np.zeros(0, dtype=np.int32)
_NO_FLOATS = np.zeros(0, dtype=np.float32)
_NO_MASK = np.zeros(0, dtype=np.bool_)


class FaultSettings(ConfigTable, frozen=True, kw_only=True):
    """The rates at which environments and engines fail."""

    env_share: float = 0.0
    """The share of attempts at an episode that end in a fault of the environment."""
    engine_hours: float | None = None
    """The mean time between two failures of an engine worker; None: none fails."""
    repair_s: float = 120.0
    """The time until a failed engine serves again."""


class TrainingState(Protocol):
    """The trainer, as far as env workers read it."""

    version: int
    waiting: Counter[str]


@dataclass
class EnvWorkerLinks:
    """The parts of the campaign that an env worker reaches."""

    queue: EventQueue
    recipe: Recipe
    source: EpisodeSource
    engines: Mapping[str, FluidEngine]
    training: TrainingState
    seal: Callable[["SimulatedEnvWorker", list[Trajectory]], object]
    """Called with the members of full groups that become durable together."""
    on_hold: Callable[[], object]
    """Called when the hold of an env worker may have changed."""
    faults: FaultSettings
    draw: random.Random
    episode_start_s: float
    """The time that an env worker takes to start an episode, after which it starts the next."""
    request_s: float
    """The time that a request and its answer are on the way between env worker and engine."""
    fates: Counter[str] = field(default_factory=Counter)
    """Generated tokens by the end of their episode."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of each episode that may be trained on."""
    generated: dict[str, int] = field(default_factory=dict)
    """The generated ones of these."""


@dataclass(eq=False)
class EpisodeRun:
    """An episode that runs."""

    task: AgentTask
    id: str
    script: EpisodeScript
    start_version: int
    needed_version: int = 0
    turn: int = 0
    num_context: int = 0
    num_generated: int = 0
    attempt: int = 0
    is_over: bool = False
    state: TrajectoryState | None = None
    request: GenerateRequest | None = None
    row: EngineRow | None = None
    at: str = ""
    """The engine that has its row."""
    tracking: AbstractContextManager[None] | None = None
    asked_at: float = 0.0


class SimulatedEnvWorker:
    """One env worker."""

    def __init__(self, links: EnvWorkerLinks, worker: EnvWorkerId, router: TurnRouter) -> None:
        recipe = links.recipe
        rollout = recipe.rollout
        self.router = router
        self.name = f"env-{worker.index}"
        self.groups = EpisodeGroups(
            group_size=rollout.group_size,
            episodes_per_group=rollout.episodes_per_group,
            replacements=rollout.replacements,
            max_lag=rollout.max_lag,
            late_after_s=rollout.late_after_s,
        )
        self.in_flight = InFlightVersions()
        self.hold: int | None = None
        """The version that training should not pass yet, as of when it was last written."""
        self.num_unsealed = 0
        """Members of full groups that are not durable."""
        self.is_draining = False
        self.runs: dict[str, EpisodeRun] = {}
        self.num_turns = 0
        """Turns that were generated."""
        self.num_in_env = 0
        """Episodes whose environment is at work."""
        self._links = links
        self._queue = links.queue
        self._admission = AdmissionControl(recipe, worker)
        self._stream = TaskStream(worker, recipe_seed=recipe.seed)
        self._weights = {name: one.weight for name, one in recipe.domains.items() if not one.held_out}
        self._num_starts: Counter[str] = Counter()
        self._is_due = False
        self._has_next_round = False
        self._without_room: deque[EpisodeRun] = deque()
        """The episodes whose turns wait for room for their KV."""
        self._is_waking = False
        self._started_until = 0.0
        """The time until which it starts episodes."""
        self._open: list[Trajectory] = []
        """Members of full groups that are not even being written."""
        self._num_sealed = 0

    # ---- groups

    def poll(self) -> None:
        """Look soon whether groups may start, and full ones should become durable."""
        if not self._is_due:
            self._is_due = True
            self._queue.call_later(0.0, self._run_round)

    def watch_late_groups(self) -> None:
        """Release groups whose last members are late, now and then."""
        newest = self._links.training.version
        for group, outcome in self.groups.end_late(newest=newest, now=self._queue.now):
            self._apply_outcome(self._find_task(group), outcome)
        self._queue.call_later(LATE_INTERVAL_S, self.watch_late_groups)

    def drain(self) -> None:
        """Abort what runs; its tasks are played again."""
        self.is_draining = True
        for run in list(self.runs.values()):
            self._abort(run, fate="end of a job")
        self._seal()

    def resume(self) -> None:
        """Play again, in the next job."""
        self.is_draining = False
        self.poll()

    def record_lost(self, group: str, task: AgentTask) -> None:
        """Play the task of a group again that the trainer has dropped."""
        self._stream.return_task(task)

    def _run_round(self) -> None:
        self._is_due = False
        if not self.is_draining:
            self._start_groups()
        self._write_hold()
        if not self.is_draining:
            self._seal_early()

    def _start_groups(self) -> None:
        training, groups = self._links.training, self.groups
        admitted = self._admission.num_admitted(
            groups, num_unsealed=self.num_unsealed, sealed=training.waiting, settled={}, now=self._queue.now
        )
        if not admitted:
            return
        if not self._is_served():
            self.router.refresh_awaited_loads(now=self._queue.now)
            if not self._is_served():
                self._poll_later()
                return
        for _ in range(self._admission.num_to_start(admitted, groups)):
            self._start_group(self._stream.draw(self._weights))

    def _write_hold(self) -> None:
        max_lag = self._links.recipe.rollout.max_lag
        limit = self.in_flight.limit(newest=self._links.training.version, max_lag=max_lag)
        if limit != self.hold:
            self.hold = limit
            self._links.on_hold()

    def _is_served(self) -> bool:
        return self._admission.has_fresh_weights(self.router.versions(), newest=self._links.training.version)

    def _poll_later(self) -> None:
        """Look in the next round that a real env worker makes without being woken."""

        def poll() -> None:
            self._has_next_round = False
            self.poll()

        if not self._has_next_round:
            self._has_next_round = True
            self._queue.call_later(ROLE_ROUND_INTERVAL_S, poll)

    def _start_group(self, task: AgentTask) -> None:
        num_before = self._num_starts[task.group]
        self._num_starts[task.group] += 1
        first = num_before * self.groups.max_episodes
        episodes = self.groups.start(task.group, first_index=first, now=self._queue.now)
        self._start_episodes(task, [get_index(episode) for episode in episodes])

    def _find_task(self, group: str) -> AgentTask:
        return next(run.task for run in self.runs.values() if run.task.group == group)

    def _apply_outcome(self, task: AgentTask, outcome: GroupOutcome) -> None:
        """Do what the end of an episode means for its group, as the env worker does."""
        self.in_flight.apply(outcome)
        self._count_fates(outcome)
        unneeded = [*outcome.abort]
        if outcome.released:
            self._release(outcome.released)
            if self._admission.record_release():
                closed = self.groups.close_all()
                for dropped in closed.dropped:
                    self.in_flight.drop(dropped)
                self._count_fates(closed)
                unneeded += closed.abort
        for episode in unneeded:
            if (run := self.runs.get(episode)) is not None:
                self._abort(run, fate="redundant")
        if outcome.start:
            self._start_episodes(task, outcome.start)
        if outcome.is_lost:
            self._stream.return_task(task, lost=True)
        if outcome.released:
            self.poll()
        else:
            self._poll_later()

    # ---- full groups

    def record_durable(self, members: Sequence[Trajectory]) -> None:
        """Record that these are durable; the hold may have been for them."""
        self.num_unsealed -= len(members)
        for one in members:
            self.in_flight.drop(one.id)
        self._write_hold()

    def _release(self, members: Sequence[Trajectory]) -> None:
        """Hold the members of a full group until others become durable with them, or they are old enough."""
        self.num_unsealed += len(members)
        if not self._open:
            number = self._num_sealed

            def seal() -> None:
                if number == self._num_sealed:
                    self._seal()

            self._queue.call_later(self._links.recipe.spool.seal_after_s, seal)
        self._open += members

    def _seal_early(self) -> None:
        """Have full groups become durable that complete a batch."""
        if self._admission.should_seal(
            self.groups,
            num_open=len(self._open),
            num_unsealed=self.num_unsealed,
            num_waiting=self._links.training.waiting.total(),
        ):
            self._seal()

    def _seal(self) -> None:
        if self._open:
            members, self._open = self._open, []
            self._num_sealed += 1
            self._links.seal(self, members)

    def _count_fates(self, outcome: GroupOutcome) -> None:
        for trajectory, status in outcome.booked:
            if status not in TRAINABLE:
                fate = "end of a job" if self.is_draining else status.removeprefix("aborted-")
                self._links.fates[fate] += self._links.generated.pop(trajectory.id, 0)
                self._links.lengths.pop(trajectory.id, None)

    # ---- episodes

    def _start_episodes(self, task: AgentTask, indices: Iterable[int]) -> None:
        newest = self._links.training.version
        oldest = self._admission.find_oldest_start(self.router.versions(), newest=newest)
        for index in indices:
            episode = task.episode(index)
            script = self._links.source.draw(task.domain, seed=episode)
            run = EpisodeRun(task=task, id=episode, script=script, start_version=newest)
            self.runs[episode] = run
            self.in_flight.start(episode, version=oldest)
            self._started_until = max(self._started_until, self._queue.now) + self._links.episode_start_s
            self._queue.call_at(self._started_until, partial(self._reset, run))

    def _reset(self, run: EpisodeRun) -> None:
        self.num_in_env += 1
        if not run.attempt:
            run.needed_version = self._admission.find_needed_version(self._links.training.version)
        self._queue.call_later(run.script.reset_s, lambda: self._start_attempt(run))

    def _start_attempt(self, run: EpisodeRun) -> None:
        self.num_in_env -= 1
        if run.is_over:
            return
        faults, domain = self._links.faults, self._links.recipe.domains[run.task.domain]
        if not faults.env_share or self._links.draw.random() >= faults.env_share:
            self._ask(run)
        elif run.attempt < domain.env_retries:
            run.attempt += 1
            pause_s = retry_pause_s(FIRST_PAUSE_S, attempt=run.attempt, episode=run.id)
            self._queue.call_later(pause_s, lambda: None if run.is_over else self._reset(run))
        else:
            self._end(run, "env-fault")

    def _ask(self, run: EpisodeRun) -> None:
        """Start the next turn."""
        turn = run.script.turns[run.turn]
        run.num_context += turn.num_fresh
        run.request = GenerateRequest(
            request_id=f"{run.id}/0/{run.turn}",
            token_ids=count_tokens(run.num_context),
            max_new_tokens=turn.num_reply,
            trajectory=run.id,
            domain=run.task.domain,
            min_version=0 if run.turn else run.needed_version,
        )
        run.state = self.router.trajectories.start_turn(run.request, now=self._queue.now)
        run.asked_at = self._queue.now
        self._send(run)

    def _send(self, run: EpisodeRun) -> None:
        """Send a turn to the engines that the router chooses."""
        if run.is_over:
            return
        assert run.request is not None
        assert run.state is not None
        decision = self.router.place_turn(run.request, run.state)
        if decision.reason == "no room for KV":
            self._without_room.append(run)
        elif decision.decode is None:
            self._queue.call_later(ENGINE_PAUSE_S, lambda: self._send(run))
        elif decision.prefill is not None:
            self._prefill(run, decision)
        else:
            self._decode(run, decision, num_known=0)

    def try_waiting(self) -> None:
        """Try the first turns that wait for room for their KV; those that find none go to the end."""
        num_refused, waiting = 0, self._without_room
        for _ in range(len(waiting)):
            self._send(run := waiting.popleft())
            num_refused += bool(waiting) and waiting[-1] is run
            if num_refused == MAX_REFUSALS:
                return

    def _wake_waiting(self) -> None:
        """Try waiting turns soon, since there may be room."""

        def wake() -> None:
            self._is_waking = False
            self.try_waiting()

        if self._without_room and not self._is_waking:
            self._is_waking = True
            self._queue.call_later(0.0, wake)

    def _prefill(self, run: EpisodeRun, decision: RoutingDecision) -> None:
        assert run.request is not None
        speed = self.router.find_speed(decision.prefill or "")
        num = len(run.request.token_ids)

        def hand_over(_: EngineRow) -> None:
            self._untrack(run)
            if run.is_over or run.state is None or speed is None:
                return
            run.state.prefill_home = decision.prefill
            wait_s = num * speed.shape.kv_bytes_per_token / LINK_BYTES_PER_S + self._links.request_s / 2
            self._queue.call_later(wait_s, lambda: self._decode(run, decision, num_known=num - 1))

        seconds = speed.prefill_s(num) if speed else 1.0
        self._submit(run, decision.prefill or "", num_new=0, num_known=0, seconds=seconds, on_end=hand_over)

    def _decode(self, run: EpisodeRun, decision: RoutingDecision, *, num_known: int) -> None:
        if run.is_over:
            return
        name = decision.decode or ""
        if not self._links.engines[name].is_up:
            self._send(run)
            return
        num_new = run.script.turns[run.turn].num_reply

        def end(row: EngineRow) -> None:
            self._untrack(run)
            self._end_turn(run, row)

        self._submit(run, name, num_new=num_new, num_known=num_known, seconds=decision.serve_s, on_end=end)

    def _submit(
        self,
        run: EpisodeRun,
        name: str,
        *,
        num_new: int,
        num_known: int,
        seconds: float,
        on_end: Callable[[EngineRow], None],
    ) -> None:
        assert run.request is not None
        assert run.state is not None
        priority = self.router.find_priority(run.request, run.state)
        num_prompt = len(run.request.token_ids)
        run.row = row = EngineRow(
            run.id,
            num_prompt=num_prompt,
            num_new=num_new,
            on_end=on_end,
            num_known=num_known,
            priority=priority,
            min_version=run.request.min_version,
        )
        run.at = name
        run.tracking = self.router.track_request(name, seconds=seconds)
        run.tracking.__enter__()

        def arrive() -> None:
            engine = self._links.engines[name]
            if run.row is row and engine.is_up:
                engine.submit(row)

        self._queue.call_later(self._links.request_s / 2, arrive)

    def _untrack(self, run: EpisodeRun) -> None:
        if run.tracking is not None:
            run.tracking.__exit__(None, None, None)
            run.tracking = None
        run.row = None

    def _end_turn(self, run: EpisodeRun, row: EngineRow) -> None:
        assert run.request is not None
        assert run.state is not None
        turn, engine = run.script.turns[run.turn], self._links.engines[run.at]
        seconds = self._queue.now - run.asked_at
        run.state.ended_at = self._queue.now
        self.router.end_turn(
            run.request, run.state, num_reply=turn.num_reply, version=engine.version, seconds=seconds, at=run.at
        )
        self.in_flight.record_version(run.id, version=row.version)
        started = run.start_version
        run.start_version = min(started, row.version) if run.turn else row.version
        if run.start_version != started:
            self._poll_later()
        run.num_context += turn.num_reply
        run.num_generated += turn.num_reply
        run.turn += 1
        self.num_turns += 1
        self.num_in_env += 1
        self._queue.call_later(self._links.request_s / 2 + turn.env_s, lambda: self._step_environment(run))

    def _step_environment(self, run: EpisodeRun) -> None:
        self.num_in_env -= 1
        if run.is_over:
            return
        training, max_lag = self._links.training, self._links.recipe.rollout.max_lag
        if is_too_old(run.start_version, newest=training.version, max_lag=max_lag):
            self._end(run, "aborted-stale")
        elif run.turn < len(run.script.turns):
            self._ask(run)
        else:
            self._end(run, "done")

    def lose_engine(self, name: str) -> None:
        """Send the turns again that an engine has lost."""
        self.router.record_failure(name, now=self._queue.now)
        for run in [run for run in self.runs.values() if run.at == name and run.row is not None]:
            self._untrack(run)
            assert run.state is not None
            run.state.num_cached = 0
            self._send(run)

    def _end(self, run: EpisodeRun, status: EpisodeStatus) -> None:
        """End an episode, with what that means for its group."""
        self._close(run)
        newest, links = self._links.training.version, self._links
        trajectory = make_trajectory(run, status, created=self._queue.now)
        links.generated[run.id], links.lengths[run.id] = run.num_generated, run.num_context
        outcome = self.groups.end(trajectory, newest=newest, now=self._queue.now)
        self.in_flight.end(run.id, is_kept=outcome is not None and outcome.is_kept)
        if outcome is not None:
            self._apply_outcome(run.task, outcome)

    def _abort(self, run: EpisodeRun, *, fate: str) -> None:
        """Cancel an episode; a task of which nothing runs any more is played again."""
        engine, row, num = self._links.engines.get(run.at), run.row, run.num_generated
        if engine is not None and row is not None and row.state != "aborted":
            num += int(engine.abort(row)) if row.num_new else 0
        self._untrack(run)
        self._close(run)
        self._links.fates[fate] += num
        self.in_flight.drop(run.id)
        was_open = self.groups.num_open
        outcome = self.groups.record_abort(run.task.group, run.id)
        for dropped in outcome.dropped:
            self.in_flight.drop(dropped)
        self._count_fates(outcome)
        if self.groups.num_open < was_open:
            self._stream.return_task(run.task)
        self._poll_later()

    def _close(self, run: EpisodeRun) -> None:
        run.is_over = True
        del self.runs[run.id]
        self.router.forget(run.id)
        self._wake_waiting()
        for engine in (self._links.engines.get(run.at),):
            if engine is not None:
                engine.forget(run.id)


def make_trajectory(run: EpisodeRun, status: EpisodeStatus, *, created: float) -> Trajectory:
    """Return the record of an episode, without its tokens."""
    return Trajectory(
        id=run.id,
        group=run.task.group,
        domain=run.task.domain,
        seed=run.task.seed,
        status=status,
        producer="",
        created=created,
        start_version=run.start_version,
        end_version=run.start_version,
        turns=[],
        reward=1.0,
        token_ids=_NO_TOKENS,
        logprobs=_NO_FLOATS,
        versions=_NO_TOKENS,
        loss_mask=_NO_MASK,
    )
