"""Role env: run many episodes at once, each on its own timeline; whole groups go to the spool "rollouts".

run               run one env worker until the job ends
EnvWorker         its episodes and their accounts
choose_parser     how answers to agent programs are read
RolloutSpool      the spool "rollouts" as an env worker uses it
POLL_INTERVAL_S   the time between two rounds of its loop
TASKS_PER_BLOCK   task numbers reserved for one start of an env worker
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CurriculumUpdated, FaultReported, ParsersChosen
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig
from hpcrl.engines.base import Completion, InferenceEngine
from hpcrl.engines.http import RemoteEngine, make_client_session
from hpcrl.envs.base import Env, TaskEnv
from hpcrl.envs.pool import open_env
from hpcrl.errors import SpoolError
from hpcrl.learn.evaluations import EvaluationStore
from hpcrl.models.chat_layout import load_chat_layout, load_chat_template
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.models.model_config import read_context_length
from hpcrl.roles.context import WorkerContext
from hpcrl.rollout.admission import AdmissionControl, compute_share
from hpcrl.rollout.agents.answer_parser import AnswerParser, choose_parsers
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.curriculum import Curriculum
from hpcrl.rollout.episode import ConversationLayout, loop_time
from hpcrl.rollout.evaluation import EvaluationHooks, EvaluationRunner
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.flow_control import HoldWriter, InFlightVersions, read_settled
from hpcrl.rollout.groups import EpisodeGroups, GroupOutcome
from hpcrl.rollout.journal import EpisodeJournal, reserve_block
from hpcrl.rollout.player import EpisodePlayer
from hpcrl.rollout.reporting import CountingPolicy, EpisodeReporter
from hpcrl.rollout.rewards import load_reward, to_reward_parts
from hpcrl.rollout.routing.factory import make_router
from hpcrl.rollout.routing.router import Router
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import AgentTask, TaskStream, stable_hash
from hpcrl.spool.listing import SegmentListing, count_trajectories
from hpcrl.spool.record import Trajectory
from hpcrl.spool.writer import BatchLimits, BatchWriter, DiskSpoolWriter
from hpcrl.weights.versions import find_newest_version

POLL_INTERVAL_S = 0.1
TASKS_PER_BLOCK = 1 << 32
MAX_REPORTED_FIELDS = 256
"""The most ignored fields of requests that a worker reports."""


def run(context: WorkerContext) -> None:
    """Run episodes until the job ends."""
    asyncio.run(_run_env_worker(context))


async def _run_env_worker(context: WorkerContext) -> None:
    while find_newest_version(context.campaign.weights) is None:  # the trainer makes model directory and first version
        if context.draining:
            return
        await asyncio.sleep(POLL_INTERVAL_S)
    async with make_client_session() as session:

        def connect(endpoint: EngineEndpoint) -> InferenceEngine:
            return RemoteEngine(endpoint, session)

        seed = stable_hash(context.recipe.seed, context.name, bits=31)
        async with make_router(
            context.recipe, context.campaign, env_index=context.index, connect=connect, seed=seed, events=context.events
        ) as router:
            env_worker = EnvWorker(
                context,
                router=router,
                layout=load_chat_layout(context.campaign.model, context.recipe.model),
                rollouts=_open_disk_spool(context),
            )
            async with contextlib.AsyncExitStack() as stack:
                if env_worker.task_queue.program_domains:
                    template = load_chat_template(context.campaign.model, context.recipe.model)
                    proxy = ModelProxy(
                        env_worker.policy,
                        template=template,
                        parser=choose_parser(context, template),
                        aliases=context.recipe.rollout.model_aliases,
                        report_ignored=partial(_report_ignored_field, context.events, set()),
                    )
                    env_worker.player.proxy = await stack.enter_async_context(proxy)
                await env_worker.run_until_drained()


def choose_parser(context: WorkerContext, template: ChatTemplate) -> AnswerParser:
    """Choose how answers are read; one worker reports it."""
    choice = choose_parsers(template.text, context.recipe.engine)
    if context.index == 0:
        context.events.emit(
            ParsersChosen(
                tool_parser=choice.tool_parser, reasoning_parser=choice.reasoning_parser, reason=choice.reason
            )
        )
    return AnswerParser.from_choice(choice, template, context.campaign.model)


@dataclass(frozen=True, kw_only=True)
class RolloutSpool:
    """The spool "rollouts" as an env worker uses it."""

    writer: BatchWriter
    num_sealed: Callable[[], int]
    """Count the durable trajectories of all env workers."""


@dataclass
class EnvWorker:
    """The episodes of one env worker and their accounts."""

    context: WorkerContext
    router: Router
    layout: ConversationLayout
    rollouts: RolloutSpool
    open_env: Callable[[str, DomainConfig], Awaitable[Env]] = open_env
    version: int = 0
    num_unsealed: int = 0
    """Released trajectories that are not durable yet."""
    episodes: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    in_flight: InFlightVersions = field(default_factory=InFlightVersions)

    def __post_init__(self) -> None:
        context, rollout = self.context, self.context.recipe.rollout
        self.groups = EpisodeGroups(
            group_size=rollout.group_size,
            episodes_per_group=rollout.episodes_per_group,
            replacements=rollout.replacements,
            max_lag=rollout.max_lag,
        )
        self.policy = CountingPolicy(self.router, on_turn=self._record_action)
        self.player = EpisodePlayer(
            recipe=context.recipe,
            layout=self.layout,
            policy=self.policy,
            context_length=_read_context_length(context),
            newest_version=lambda: self.version,
            producer=context.name,
        )
        self.worker = EnvWorkerId(context.index, context.role_plan.num_workers)
        self.task_sets = TaskSets(
            context.recipe,
            self.worker,
            directory=context.campaign.tasks,
            progress=context.campaign.task_progress(context.index),
        )
        self.task_queue = TaskQueue(
            context.recipe.domains,
            tasks=TaskStream(
                self.worker,
                recipe_seed=context.recipe.seed,
                start=reserve_block(context.campaign.task_blocks, env_index=context.index) * TASKS_PER_BLOCK,
                rows=self.task_sets,
            ),
            read_fields=self.task_sets.read_fields,
            budget=FaultBudget(max_fault_share=rollout.max_env_faults),
            groups_ahead=rollout.groups_ahead,
            episodes_per_group=rollout.episodes_per_group,
            cpus=context.role_plan.cpus_per_worker,
            mem_gib=context.role_plan.mem_gib_per_worker,
            open_env=self.open_env,
        )
        self.reporter = EpisodeReporter(
            context.recipe.domains,
            groups=self.groups,
            policy=self.policy,
            agenda=self.task_queue,
            emit=context.events.emit,
        )
        self.curriculum = Curriculum.from_recipe(context.recipe, events=context.campaign.events)
        self.admission = AdmissionControl(context.recipe, self.worker)
        self.journal = EpisodeJournal(context.campaign.journal(context.index))
        self.hold_writer = HoldWriter(context.campaign.hold(context.index))
        self.evaluator = _make_evaluator(self) if context.recipe.evaluation.every_versions else None

    async def run_until_drained(self) -> None:
        """Start groups, seal and report until the job drains; then abort running episodes and seal what is finished."""
        self._recover()
        while not self.context.draining:
            self.version = max(self.version, find_newest_version(self.context.campaign.weights) or 0)
            await self._start_groups()
            self._continue_evaluation()
            self._write_hold()
            await self._seal(self.rollouts.writer.flush_due)
            self.task_sets.save_due(now=loop_time())
            self.reporter.report_due(now=loop_time())
            await asyncio.sleep(POLL_INTERVAL_S)
        for task in self.episodes.values():
            task.cancel()
        await asyncio.gather(*self.episodes.values(), return_exceptions=True)
        if self.evaluator is not None:
            await self.evaluator.close()
        await self.task_queue.close()
        await self._seal(self.rollouts.writer.close)
        self.task_sets.save()
        self.reporter.report()
        self.journal.close()

    def _recover(self) -> None:
        """Record as lost the episodes that an earlier run of this worker left when it was killed."""
        self.reporter.lose_episodes(self.groups.ledger.record_lost(self.journal.open()))

    async def _start_groups(self) -> None:
        """Start all groups that are admitted now, by the weights of the curriculum if there is one."""
        if self.curriculum is not None and (weights := self.curriculum.poll_weights(now=loop_time())) is not None:
            self.task_queue.set_weights(weights)
            self.context.events.emit(CurriculumUpdated(weights=weights))
        waiting = self.rollouts.num_sealed() - self._read_num_settled()
        admitted = self.admission.num_admitted(self.groups, num_unsealed=self.num_unsealed, num_waiting=waiting)
        if admitted and not self._is_served():
            await self.router.refresh()
            if not self._is_served():
                return
        for _ in range(self.admission.num_to_start(admitted, self.groups)):
            task = self.task_queue.take_task(now=loop_time())
            if task is None:
                return
            self._start_group(task)
            await asyncio.sleep(0)  # thousands may start at once: let running episodes continue in between

    def _is_served(self) -> bool:
        return self.admission.has_fresh_weights(self.router.versions(), newest=self.version)

    def _continue_evaluation(self) -> None:
        """Continue the evaluation, if there is one, in the room that training leaves."""
        if self.evaluator is not None:
            max_running = compute_share(self.context.recipe.rollout.max_running, self.worker)
            self.evaluator.poll(version=self.version, room=max_running - self.groups.num_running, now=loop_time())

    def _read_num_settled(self) -> int:
        """Return the number of settled trajectories; the same file also announces a version being published."""
        settled = read_settled(self.context.campaign.settled)
        self.version = max(self.version, settled.version)
        return settled.num

    def _start_group(self, task: AgentTask) -> None:
        """Start a group; from here on its episodes run independently."""
        self.journal.record_start(self.groups.start(task.group))
        self._start_episodes(task, range(self.context.recipe.rollout.episodes_per_group))

    def _start_episodes(self, task: AgentTask, indices: Iterable[int]) -> None:
        for index in indices:
            episode = task.episode(index)
            self.in_flight.start(episode, version=self.version)
            self.episodes[episode] = asyncio.create_task(self._run_episode(task, index), name=episode)

    async def _run_episode(self, task: AgentTask, index: int) -> None:
        episode = task.episode(index)
        try:
            async with self.task_queue.reserve_slot(task):
                trajectory = await self._play_training(task, index)
            while not self.rollouts.writer.has_room:  # the disk is slow or full: wait
                await asyncio.sleep(POLL_INTERVAL_S)
        except asyncio.CancelledError:
            self.in_flight.drop(episode)
            self.groups.record_abort(task.group, episode)
            self.task_queue.discard_envs(task)
            self._return_row(task)
            self.journal.record_end(episode, running=self.groups.ledger.running)
            return
        finally:
            del self.episodes[episode]
            self.router.forget(episode)
        self._record_result(task, trajectory)

    async def _play_training(self, task: AgentTask, index: int) -> Trajectory:
        """Play an episode for training."""
        domain = self.context.recipe.domains[task.domain]
        return await self.player.play(
            domain,
            task,
            index,
            make_env=lambda: self.task_queue.take_env(task),
            limits=self.player.limits(domain),
            read_fields=lambda: self.task_sets.read_fields(task),
        )

    async def play_held_out(self, task: AgentTask, index: int, name: str, domain: DomainConfig) -> Trajectory:
        """Play an episode of an evaluation: no version is too old for it."""
        limits = msgspec.structs.replace(
            self.player.limits(domain), max_lag=sys.maxsize, temperature=self.context.recipe.evaluation.temperature
        )
        try:
            async with self.task_queue.reserve_slot(msgspec.structs.replace(task, domain=name)):
                return await self.player.play(
                    domain,
                    task,
                    index,
                    make_env=lambda: self._open_held_out(task, name, domain),
                    limits=limits,
                    read_fields=lambda: self.task_sets.read_fields(task),
                )
        finally:
            self.router.forget(task.episode(index))

    async def _open_held_out(self, task: AgentTask, name: str, domain: DomainConfig) -> Env:
        """Make an environment for an episode of an evaluation."""
        fields = self.task_sets.read_fields(task)
        env = await self.open_env(name, domain)
        return env if fields is None else TaskEnv(env, fields)

    def _record_result(self, task: AgentTask, trajectory: Trajectory) -> None:
        outcome = self.groups.end(trajectory, newest=self.version)
        self.in_flight.end(trajectory.id, outcome)
        if outcome is None:
            return
        self.journal.record_end(trajectory.id, running=self.groups.ledger.running)
        self.reporter.end_episode(trajectory, outcome.status, now=loop_time())
        for kept in outcome.released:
            self.rollouts.writer.append(kept)
        self.num_unsealed += len(outcome.released)
        for episode in [*outcome.abort, *self._cancel_spare_groups(outcome)]:
            self.episodes[episode].cancel()
        if outcome.start:
            self.journal.record_start([task.episode(index) for index in outcome.start])
            self._start_episodes(task, outcome.start)
        if outcome.released:
            self.task_sets.release_task(task, [kept.id for kept in outcome.released])
        if outcome.is_lost:
            self.task_sets.finish_task(task)
        if outcome.released or outcome.is_lost:
            self.task_queue.discard_envs(task)
        self._return_row(task)

    def _return_row(self, task: AgentTask) -> None:
        """Use the row of a group again that was cancelled, once its last episode has ended."""
        if not self.groups.is_running(task.group):
            self.task_sets.return_task(task)

    def _cancel_spare_groups(self, outcome: GroupOutcome) -> list[str]:
        """Return the episodes of spare groups to cancel, once the batch has what it needs."""
        if not (outcome.released and self.admission.record_release()):
            return []
        aborted, dropped = self.groups.close_all()
        for episode in dropped:
            self.in_flight.drop(episode)
        return aborted

    def _record_action(self, episode: str, completion: Completion) -> None:
        self.in_flight.record_version(episode, version=min(completion.versions, default=self.version))

    async def _seal(self, flush: Callable[[], list[str]]) -> None:
        """Make trajectories durable in a thread. On a full disk nothing is lost; writes are retried ever less often."""
        try:
            sealed = await asyncio.to_thread(flush)
        except SpoolError as error:
            self.context.events.emit(FaultReported(what="spool", detail=str(error)))
        else:
            self.num_unsealed -= len(
                sealed
            )  # a separate statement after the await: meanwhile, ending episodes add to it
            self.task_sets.record_sealed(sealed)
            for episode in sealed:
                self.in_flight.drop(episode)

    def _write_hold(self) -> None:
        """Ask the trainer to delay a version that would make running episodes too old, where that is worth it."""
        max_lag = self.context.recipe.rollout.max_lag
        self.hold_writer.write(self.in_flight.limit(newest=self.version, max_lag=max_lag), now=loop_time())


def _read_context_length(context: WorkerContext) -> int:
    return read_context_length(context.campaign.model, max_model_len=context.recipe.engine.max_model_len)


def _make_evaluator(env_worker: EnvWorker) -> EvaluationRunner:
    """Make the evaluator of this worker. Scores are computed here, each in a thread: there are few of them."""
    context = env_worker.context
    model, domains = context.campaign.model, context.recipe.domains
    rewards = {name: load_reward(name, domain, model=model) for name, domain in domains.items()}

    async def score(name: str, trajectory: Trajectory) -> float:
        return sum(to_reward_parts(await asyncio.to_thread(rewards[name], trajectory)).values())

    return EvaluationRunner(
        context.recipe,
        env_worker.worker,
        job=context.job.number,
        record=EvaluationStore(context.campaign.evaluations),
        hooks=EvaluationHooks(
            play=env_worker.play_held_out,
            score=score,
            emit=context.events.emit,
            oldest_version=lambda: min(env_worker.router.versions(), default=-1),
        ),
    )


def _report_ignored_field(events: EventLog, known: set[tuple[str, str]], session: ProgramSession, name: str) -> None:
    """Report a field of a program's requests that is ignored, once for each domain; each record has all of them."""
    if (session.domain, name) not in known and len(known) < MAX_REPORTED_FIELDS:
        known.add((session.domain, name))
        detail = f"programs of domain {session.domain!r} send {name!r}, which is not known here: it is ignored"
        events.emit(FaultReported(what="request", detail=detail, id=session.trajectory, domain=session.domain))


def _open_disk_spool(context: WorkerContext) -> RolloutSpool:
    rollout, spool, directory = context.recipe.rollout, context.recipe.spool, context.campaign.spool("rollouts")
    batching = BatchLimits(
        max_bytes=spool.max_segment_mib << 20, max_count=rollout.group_size * 64, max_age_s=spool.seal_after_s
    )
    listing = SegmentListing(directory)
    writer = DiskSpoolWriter(directory, producer=context.name, batching=batching, compression=spool.compression)
    return RolloutSpool(writer=writer, num_sealed=lambda: count_trajectories(listing.names()))
