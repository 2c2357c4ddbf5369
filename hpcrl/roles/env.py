"""Role env: run many episodes at once, each on its own timeline; whole groups go to the spool "rollouts".

run               run one env worker until the job ends
EnvWorker         starts episodes, and does with their results what their groups decide
POLL_INTERVAL_S   the time between two rounds of its loop
TRAINED_INTERVAL_S    the time between two looks at what became of its groups in training
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, CurriculumUpdated, FlatGroupsDropped, StaleDropped
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig, RolloutConfig
from hpcrl.engines.base import Completion, InferenceEngine
from hpcrl.engines.http import RemoteEngine, make_client_session
from hpcrl.envs.base import Env, is_program_domain
from hpcrl.envs.pool import open_env
from hpcrl.learn.consumed import read_consumed_groups
from hpcrl.learn.evaluations import EvaluationStore
from hpcrl.models.chat_layout import load_chat_layout, load_chat_template
from hpcrl.models.model_config import read_context_length
from hpcrl.roles.context import WorkerContext, make_judge_report
from hpcrl.roles.episode_player import EpisodePlayer, HeldOutPlayer
from hpcrl.roles.program_proxy import make_proxy, make_thought_reader
from hpcrl.rollout.admission import AdmissionControl, compute_share
from hpcrl.rollout.curriculum import Curriculum
from hpcrl.rollout.episode import ConversationLayout, loop_time
from hpcrl.rollout.episode_accounts import EpisodeAccounts
from hpcrl.rollout.evaluation import EvaluationHooks, EvaluationRunner
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.flow_control import HoldWriter, TrainerProgress
from hpcrl.rollout.groups import EpisodeGroups, GroupOutcome
from hpcrl.rollout.journal import TaskJournal
from hpcrl.rollout.judges.proxy import open_judge_proxy
from hpcrl.rollout.quick_rewards import QuickScorer
from hpcrl.rollout.reporting import CountingPolicy, EpisodeReporter
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.rollout.rollout_spool import RolloutSpool, open_rollout_spool
from hpcrl.rollout.routing.factory import make_router
from hpcrl.rollout.routing.router import Router
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import AgentTask, TaskStream, stable_hash
from hpcrl.rollout.trajectory_scorer import TrajectoryScorer
from hpcrl.spool.reader import list_last_groups
from hpcrl.spool.record import Trajectory
from hpcrl.system.file_watch import WatchedValue
from hpcrl.system.processes import do_nothing
from hpcrl.system.pulse import expect_work, note_work
from hpcrl.system.wakeups import WakeEvent
from hpcrl.weights.versions import find_newest_version

POLL_INTERVAL_S = 0.1
TRAINED_INTERVAL_S = 5.0

EnvOpener = Callable[[str, DomainConfig], Awaitable[Env]]


def run(context: WorkerContext) -> None:
    """Run episodes until the job ends."""
    asyncio.run(_run_env_worker(context))


async def _run_env_worker(context: WorkerContext) -> None:
    with context.open_wakeups() as wakeups:
        await _play_until_drained(context, wakeups)


async def _play_until_drained(context: WorkerContext, wakeups: WakeEvent) -> None:
    campaign, recipe = context.campaign, context.recipe
    if not await context.await_model(wakeups):
        return
    has_turns = not all(map(is_program_domain, recipe.domains.values()))
    layout = load_chat_layout(campaign.model, recipe.model) if has_turns else None
    template = layout.template if layout else load_chat_template(campaign.model, recipe.model)
    if not await _await_first_version(context, wakeups):
        return
    async with contextlib.AsyncExitStack() as stack:
        report = make_judge_report(context)
        stack.enter_context(open_judge_proxy(recipe, campaign, job=context.job.number, report=report))
        session = await stack.enter_async_context(make_client_session())
        router = _make_worker_router(context, connect=lambda endpoint: RemoteEngine(endpoint, session))
        env_worker = EnvWorker(
            context,
            router=await stack.enter_async_context(router),
            layout=layout,
            rollouts=_open_rollouts(context, wakeups),
            wakeups=wakeups,
            wake_trainer=context.make_sender("train").wake,
        )
        env_worker.player.read_answer = make_thought_reader(context, template)
        if env_worker.task_queue.program_domains:
            proxy = make_proxy(context, env_worker.policy, template=template)
            env_worker.player.proxy = await stack.enter_async_context(proxy)
        await env_worker.run_until_drained()


async def _await_first_version(context: WorkerContext, wakeups: WakeEvent) -> bool:
    """Wait until there are weights to play with; return False if the job drains before."""
    weights = context.campaign.weights
    newest = WatchedValue(weights, lambda: find_newest_version(weights))
    while newest.poll() is None:
        if context.draining:
            return False
        if await wakeups.wait(POLL_INTERVAL_S):
            newest.expect_change()
    return True


def _make_worker_router(context: WorkerContext, *, connect: Callable[[EngineEndpoint], InferenceEngine]) -> Router:
    return make_router(
        context.recipe,
        context.campaign,
        job=context.job.number,
        worker=EnvWorkerId(context.index, context.role_plan.num_workers),
        connect=connect,
        seed=stable_hash(context.recipe.seed, context.name, bits=31),
        events=context.events,
        find_gpu=context.site.find_gpu,
    )


def _open_rollouts(context: WorkerContext, wakeups: WakeEvent) -> RolloutSpool:
    """Open the spool; a sealed segment wakes its readers, and this worker, which counts what waits."""
    readers, loop = context.make_sender("train", "reward"), asyncio.get_running_loop()

    def wake_readers() -> None:
        readers.wake()
        wakeups.set_from_thread(loop)

    return open_rollout_spool(
        context.campaign.spool("rollouts"),
        recipe=context.recipe,
        producer=context.name,
        emit=context.events.emit,
        scored=context.campaign.spool("scored"),
        on_sealed=wake_readers,
    )


@dataclass
class EnvWorker:
    """The episodes of one env worker: when they start, and what their results lead to."""

    context: WorkerContext
    router: Router
    layout: ConversationLayout | None
    """None if all domains are agent programs."""
    rollouts: RolloutSpool
    open_env: EnvOpener = open_env
    wakeups: WakeEvent = field(default_factory=WakeEvent)
    """Ends the pause between two rounds early."""
    wake_trainer: Callable[[], object] = do_nothing
    """Called when the hold has changed."""
    episodes: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        context, campaign, recipe = self.context, self.context.campaign, self.context.recipe
        self.worker = EnvWorkerId(context.index, context.role_plan.num_workers)
        self.progress = TrainerProgress(weights=campaign.weights, settled=campaign.settled)
        self.journal = TaskJournal(campaign.journal(context.index))
        self.task_sets = TaskSets(
            recipe, self.worker, directory=campaign.tasks, num_drawn=self.journal.state.draws.rows
        )
        self.task_queue = _make_task_queue(self)
        self.curriculum = Curriculum.from_recipe(recipe, events=campaign.events)
        self.accounts = EpisodeAccounts(
            _make_groups(recipe.rollout),
            journal=self.journal,
            return_task=self.task_queue.return_task,
            emit=context.events.emit,
        )
        self.admission = AdmissionControl(recipe, self.worker)
        self.train_events = EventReader.for_role(campaign.events, "train")
        self.looked_at = float("-inf")
        self.hold_writer = HoldWriter(campaign.hold(context.index))
        self.policy = CountingPolicy(self.router, on_turn=self._record_turn)
        self.player = _make_player(self)
        self.reporter = EpisodeReporter(
            recipe.domains,
            groups=self.accounts.groups,
            policy=self.policy,
            task_queue=self.task_queue,
            emit=context.events.emit,
            num_workers=self.worker.count,
        )
        self.quick_scorer = QuickScorer(recipe, model=campaign.model)
        self.scorer = _make_scorer(context)
        self.evaluator = _make_evaluator(self) if recipe.evaluation.every_versions else None

    async def run_until_drained(self) -> None:
        """Start groups, seal and report until the job drains; then abort running episodes and seal what is finished."""
        released = self.accounts.list_released()
        self.accounts.recover(durable=_find_durable(self.context, released) if released else ())
        expect_work("ended no turn and no episode", self._find_work_limit())
        while not self.context.draining:
            self.progress.poll()
            if not self.episodes or not self._is_served():
                note_work()  # it has nothing to do
            self._follow_curriculum()
            self._follow_training(now=loop_time())
            self._end_late_groups()
            await self._start_groups()
            self._continue_evaluation()
            self._write_hold()
            await self._seal()
            self.reporter.report_due(now=loop_time())
            await self._pause()
        await self._drain()

    async def _pause(self) -> None:
        """Wait for the next round, which comes early if another process, or the end of a group, asks for it."""
        due = loop_time() + POLL_INTERVAL_S
        if await self.wakeups.wait(POLL_INTERVAL_S):
            self.progress.expect_change()
            self.rollouts.expect_change()
        else:
            self.reporter.note_delay(loop_time() - due)

    async def _seal(self) -> None:
        """Make durable what is old enough, or completes a batch."""
        is_whole = self.admission.should_seal(
            self.accounts.groups,
            num_open=self.rollouts.num_open,
            num_unsealed=self.rollouts.num_unsealed,
            num_waiting=self._count_waiting(),
        )
        seal = self.rollouts.seal_early if is_whole else self.rollouts.seal_due
        self.accounts.record_sealed(await seal())

    def _count_waiting(self) -> int:
        """Count the trajectories of all env workers that are durable and not settled."""
        return self.rollouts.count_sealed() - self.progress.num_settled

    def _find_work_limit(self) -> float:
        """Return how long no turn and no episode may end: an agent program may work for long between two turns."""
        domains = self.context.recipe.domains.values()
        return max(self.context.stall_s, *(one.episode_timeout_s for one in domains if is_program_domain(one)), 0.0)

    def _follow_curriculum(self) -> None:
        """Draw tasks by the new weights of the curriculum, if there are any."""
        if self.curriculum is not None and (weights := self.curriculum.poll_weights(now=loop_time())) is not None:
            self.task_queue.set_weights(weights)
            self.context.events.emit(CurriculumUpdated(weights=weights))

    def _follow_training(self, *, now: float) -> None:
        """Start the groups again that the trainer dropped as too old; end the tasks of those that it is done with."""
        if now - self.looked_at < TRAINED_INTERVAL_S:
            return
        self.looked_at = now
        has_checkpoint = False
        for event in self.train_events.poll():
            match event:
                case StaleDropped():
                    self.accounts.record_dropped(event.groups, at=event.time)
                case FlatGroupsDropped():
                    self.accounts.record_trained(set(event.groups))
                case CheckpointSaved():
                    has_checkpoint = True
        if has_checkpoint:
            self.accounts.record_trained(read_consumed_groups(self.context.campaign.checkpoints))

    async def _start_groups(self) -> None:
        """Start all groups that are admitted now."""
        groups = self.accounts.groups
        admitted = self.admission.num_admitted(
            groups, num_unsealed=self.rollouts.num_unsealed, num_waiting=self._count_waiting()
        )
        if admitted and not self._is_served():
            await self.router.refresh_soon()
            if not self._is_served():
                return
        if not self.accounts.can_start:
            return
        for _ in range(self.admission.num_to_start(admitted, groups)):
            task = self.task_queue.take_task(now=loop_time())
            if task is None:
                return
            self._start_group(task)
            await asyncio.sleep(0)  # thousands may start at once: let running episodes continue in between

    def _is_served(self) -> bool:
        return self.admission.has_fresh_weights(self.router.versions(), newest=self.progress.newest_version)

    def _start_group(self, task: AgentTask) -> None:
        """Start a group; from here on its episodes run independently."""
        indices = self.accounts.start_group(task, version=self.progress.newest_version, now=loop_time())
        self._start_episodes(task, indices)

    def _start_episodes(self, task: AgentTask, indices: Iterable[int]) -> None:
        for index in indices:
            episode = task.episode(index)
            running = asyncio.create_task(self._run_episode(task, index), name=episode)
            self.episodes[episode] = running
            running.add_done_callback(partial(self._abort_unstarted, task, index))

    async def _run_episode(self, task: AgentTask, index: int) -> None:
        episode = task.episode(index)
        try:
            trajectory = await self.player.play_training(task, index)
            await self.rollouts.wait_for_room()
        except asyncio.CancelledError:
            self._abort_episode(task, index)
            return
        finally:
            del self.episodes[episode]
            self.router.forget(episode)
        self._record_result(task, trajectory)

    def _abort_episode(self, task: AgentTask, index: int) -> None:
        self.reporter.count_endings(self.accounts.abort_episode(task, index).booked)
        self.reporter.abort_episode(task.episode(index))
        self.task_queue.end_task(task)

    def _abort_unstarted(self, task: AgentTask, index: int, ended: "asyncio.Task[None]") -> None:
        """Abort an episode that was cancelled before its first step, of which its coroutine has seen nothing.

        Its group would wait for it for ever, and the trainer for the group.
        """
        episode = task.episode(index)
        if self.episodes.get(episode) is ended:
            del self.episodes[episode]
            self._abort_episode(task, index)

    def _record_turn(self, episode: str, completion: Completion) -> None:
        note_work()
        version = min(completion.versions, default=self.progress.newest_version)
        self.accounts.in_flight.record_version(episode, version=version)
        self.reporter.record_turn(episode, len(completion.token_ids))

    def _record_result(self, task: AgentTask, trajectory: Trajectory) -> None:
        """Do what the end of an episode means for its group: release it, abort the rest of it, or replace a member."""
        note_work()
        now = loop_time()
        outcome = self.accounts.end_episode(task, trajectory, newest=self.progress.newest_version, now=now)
        if outcome is None:
            return
        self.reporter.end_episode(trajectory, now=now)
        self._apply_outcome(task, outcome)

    def _end_late_groups(self) -> None:
        """Release the groups whose last members are late."""
        newest = self.progress.newest_version
        for task, outcome in self.accounts.end_late(newest=newest, now=loop_time()):
            self._apply_outcome(task, outcome)

    def _apply_outcome(self, task: AgentTask, outcome: GroupOutcome) -> None:
        self.reporter.count_endings(outcome.booked)
        if outcome.released:
            self.rollouts.release(self.quick_scorer.score(outcome.released))
            self.wakeups.set()
        unneeded = [*outcome.abort]
        if outcome.released and self.admission.record_release():
            closed = self.accounts.close_groups()
            self.reporter.count_endings(closed.booked)
            unneeded += closed.abort
        for episode in unneeded:
            self.episodes[episode].cancel()
        self._start_episodes(task, outcome.start)
        if outcome.released or outcome.is_lost:
            self.task_queue.end_task(task)

    def _continue_evaluation(self) -> None:
        """Continue the evaluation, if there is one, in the room that training leaves."""
        if self.evaluator is not None:
            max_running = compute_share(self.context.recipe.rollout.max_running, self.worker)
            room = max_running - self.accounts.groups.num_running
            self.evaluator.poll(version=self.progress.newest_version, room=room, now=loop_time())

    def _write_hold(self) -> None:
        """Ask the trainer to delay a version that would make running episodes too old, where that is worth it."""
        max_lag = self.context.recipe.rollout.max_lag
        limit = self.accounts.in_flight.limit(newest=self.progress.newest_version, max_lag=max_lag)
        if self.hold_writer.write(limit, now=loop_time()):
            self.wake_trainer()

    async def _drain(self) -> None:
        for task in self.episodes.values():
            task.cancel()
        await asyncio.gather(*self.episodes.values(), return_exceptions=True)
        if self.evaluator is not None:
            await self.evaluator.close()
        await self.scorer.close()
        await self.task_queue.close()
        self.accounts.record_sealed(await self.rollouts.close())
        self.accounts.close()
        self.reporter.report()


def _make_groups(rollout: RolloutConfig) -> EpisodeGroups:
    return EpisodeGroups(
        group_size=rollout.group_size,
        episodes_per_group=rollout.episodes_per_group,
        replacements=rollout.replacements,
        max_lag=rollout.max_lag,
        late_after_s=rollout.late_after_s,
    )


def _make_player(env_worker: EnvWorker) -> EpisodePlayer:
    context, recipe = env_worker.context, env_worker.context.recipe
    return EpisodePlayer(
        recipe=recipe,
        layout=env_worker.layout,
        policy=env_worker.policy,
        task_queue=env_worker.task_queue,
        read_fields=env_worker.task_sets.read_fields,
        context_length=read_context_length(context.campaign.model, max_model_len=recipe.engine.max_model_len),
        newest_version=lambda: env_worker.progress.newest_version,
        producer=context.name,
    )


def _make_scorer(context: WorkerContext) -> TrajectoryScorer:
    concurrency, num_cpus = context.recipe.reward.concurrency, context.role_plan.cpus_per_worker
    return TrajectoryScorer(RewardProcess(context.campaign.root, concurrency=concurrency, num_cpus=num_cpus))


def _make_task_queue(env_worker: EnvWorker) -> TaskQueue:
    context, journal, task_sets = env_worker.context, env_worker.journal, env_worker.task_sets
    recipe = context.recipe
    stream = TaskStream(
        env_worker.worker,
        recipe_seed=recipe.seed,
        rows=task_sets,
        progress=journal.state.draws,
        record_draw=journal.record_draw,
    )
    return TaskQueue(
        recipe.domains,
        tasks=stream,
        read_fields=task_sets.read_fields,
        budget=FaultBudget(max_fault_share=recipe.rollout.max_env_faults),
        groups_ahead=recipe.rollout.groups_ahead,
        episodes_per_group=recipe.rollout.episodes_per_group,
        cpus=context.role_plan.cpus_per_worker,
        mem_gib=context.role_plan.mem_gib_per_worker,
        open_env=env_worker.open_env,
    )


def _find_durable(context: WorkerContext, groups: Collection[str]) -> set[str]:
    """Return those of these groups, which an earlier run of this worker released, that are trained or in the spool."""
    campaign = context.campaign
    consumed = read_consumed_groups(campaign.checkpoints)
    present = list_last_groups(campaign.spool("rollouts"), worker=f"env-{context.index}")
    return {group for group in groups if group in consumed or group in present}


def _make_evaluator(env_worker: EnvWorker) -> EvaluationRunner:
    context, router = env_worker.context, env_worker.router
    held_out = HeldOutPlayer(
        player=env_worker.player,
        open_env=env_worker.open_env,
        scorer=env_worker.scorer,
        forget=router.forget,
    )
    return EvaluationRunner(
        context.recipe,
        env_worker.worker,
        job=context.job.number,
        record=EvaluationStore(context.campaign.evaluations),
        hooks=EvaluationHooks(
            play=held_out.play,
            score=held_out.score,
            emit=context.events.emit,
            oldest_version=lambda: min(router.versions(), default=-1),
        ),
    )
