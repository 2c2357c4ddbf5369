"""Role env: run many episodes at once, each on its own timeline; whole groups go to the spool "rollouts".

run               run one env worker until the job ends
make_env_worker   make the worker of its parts
EnvWorker         the worker's loop; its episodes are run by EpisodeRunner
TrainingFollower  follows what becomes of its groups in training
TRAINED_INTERVAL_S    the time between two looks at what became of its groups in training
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, CurriculumUpdated, FlatGroupsDropped, StaleDropped
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig, RolloutConfig
from hpcrl.engines.base import InferenceEngine
from hpcrl.engines.node_socket import EngineConnections
from hpcrl.envs.base import Env, is_program_domain
from hpcrl.envs.pool import open_env
from hpcrl.learn.consumed import read_consumed_groups
from hpcrl.learn.evaluations import EvaluationStore
from hpcrl.models.chat_layout import load_chat_layout, load_chat_template
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.models.model_config import read_context_length
from hpcrl.roles.context import ROLE_ROUND_INTERVAL_S, WorkerContext, make_judge_report
from hpcrl.roles.episode_player import EpisodePlayer, HeldOutPlayer
from hpcrl.roles.episode_runner import EpisodeRunner
from hpcrl.roles.program_proxy import make_proxy, make_thought_reader
from hpcrl.rollout.admission import AdmissionControl, compute_share, subtract_counts
from hpcrl.rollout.curriculum import Curriculum
from hpcrl.rollout.episode import ConversationLayout, loop_time
from hpcrl.rollout.episode_accounts import EpisodeAccounts
from hpcrl.rollout.evaluation import EvaluationHooks, EvaluationRunner
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.flow_control import HoldWriter, TrainerProgress
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.journal import TaskJournal
from hpcrl.rollout.judges.proxy import open_judge_proxy
from hpcrl.rollout.quick_rewards import QuickScorer
from hpcrl.rollout.reporting import CountingPolicy, EpisodeReporter
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.rollout.rollout_spool import RolloutSpool, open_rollout_spool
from hpcrl.rollout.routing.factory import make_router
from hpcrl.rollout.routing.router import Router
from hpcrl.rollout.task_queue import ReadFields, TaskQueue
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import TaskStream, stable_hash
from hpcrl.rollout.trajectory_scorer import TrajectoryScorer
from hpcrl.spool.reader import list_last_groups
from hpcrl.system.file_watch import WatchedValue
from hpcrl.system.processes import do_nothing
from hpcrl.system.pulse import expect_work, note_work
from hpcrl.system.wakeups import WakeEvent
from hpcrl.weights.versions import find_newest_version

TRAINED_INTERVAL_S = 10.0

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
        judges = open_judge_proxy(
            recipe, campaign, job=context.job.number, report=report, certificate=context.certificate
        )
        stack.enter_context(judges)
        connections = await stack.enter_async_context(EngineConnections(context.certificate))
        router = _make_worker_router(context, connect=connections.connect)
        env_worker = make_env_worker(
            context,
            router=await stack.enter_async_context(router),
            layout=layout,
            template=template,
            rollouts=_open_rollouts(context, wakeups),
            wakeups=wakeups,
            wake_trainer=context.make_sender("train").wake,
        )
        if (proxy := env_worker.runner.player.proxy) is not None:
            await stack.enter_async_context(proxy)
        await env_worker.run_until_drained()


async def _await_first_version(context: WorkerContext, wakeups: WakeEvent) -> bool:
    """Wait until there are weights to play with; return False if the job drains before."""
    weights = context.campaign.weights
    newest = WatchedValue(weights, lambda: find_newest_version(weights))
    while newest.poll() is None:
        if context.draining:
            return False
        if await wakeups.wait(ROLE_ROUND_INTERVAL_S):
            newest.expect_change()
    return True


def _make_worker_router(context: WorkerContext, *, connect: Callable[[EngineEndpoint], InferenceEngine]) -> Router:
    return make_router(
        context.recipe,
        context.campaign,
        job=context.job.number,
        worker=_identify_worker(context),
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


class TrainingFollower:
    """Follows what becomes of an env worker's groups in training."""

    def __init__(self, campaign: CampaignDir, *, accounts: EpisodeAccounts) -> None:
        """Record in `accounts` what the trainer reports."""
        self._checkpoints = campaign.checkpoints
        self._events = EventReader.for_role(campaign.events, "train")
        self._accounts = accounts
        self._looked_at = float("-inf")

    def poll(self, *, now: float) -> None:
        """Start the groups again that the trainer dropped as too old; end the tasks of those that it is done with."""
        if now - self._looked_at < TRAINED_INTERVAL_S:
            return
        self._looked_at = now
        has_checkpoint = False
        for event in self._events.poll():
            match event:
                case StaleDropped():
                    self._accounts.record_dropped(event.groups, at=event.time)
                case FlatGroupsDropped():
                    self._accounts.record_trained(set(event.groups))
                case CheckpointSaved():
                    has_checkpoint = True
        if has_checkpoint:
            self._accounts.record_trained(read_consumed_groups(self._checkpoints))


@dataclass(frozen=True, kw_only=True)
class EnvWorker:
    """The loop of one env worker: when its groups start, and what it does between their episodes."""

    context: WorkerContext
    router: Router
    runner: EpisodeRunner
    progress: TrainerProgress
    task_queue: TaskQueue
    accounts: EpisodeAccounts
    admission: AdmissionControl
    rollouts: RolloutSpool
    reporter: EpisodeReporter
    curriculum: Curriculum | None
    follower: TrainingFollower
    hold_writer: HoldWriter
    scorer: TrajectoryScorer
    """Computes the rewards of evaluations."""
    evaluator: EvaluationRunner | None
    wakeups: WakeEvent
    """Ends the pause between two rounds early."""
    wake_trainer: Callable[[], object]
    """Called when the hold has changed."""

    async def run_until_drained(self) -> None:
        """Start groups, seal and report until the job drains; then abort running episodes and seal what is finished."""
        released = self.accounts.list_released()
        self.accounts.recover(durable=_find_durable(self.context, released) if released else ())
        expect_work("ended no turn and no episode", self._find_work_limit())
        while not self.context.draining:
            self.progress.poll()
            if not self.runner.running or not self._is_served():
                note_work()  # it has nothing to do
            self._follow_curriculum()
            self.follower.poll(now=loop_time())
            self.runner.end_late_groups()
            await self._start_groups()
            self._continue_evaluation()
            self._write_hold()
            await self._seal()
            self.reporter.report_due(now=loop_time())
            await self._pause()
        await self._drain()

    async def _pause(self) -> None:
        """Wait for the next round, which comes early if another process, or the end of a group, asks for it."""
        due = loop_time() + ROLE_ROUND_INTERVAL_S
        if await self.wakeups.wait(ROLE_ROUND_INTERVAL_S):
            self.progress.expect_change()
            self.rollouts.expect_change()
            if not self._is_served():
                self.router.expect_engine()
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
        if sealed := await seal():
            self.accounts.record_sealed(sealed)
            self._write_hold()  # they may have been what training waited for

    def _count_waiting(self) -> int:
        """Count the trajectories of all env workers that are durable and not settled."""
        return sum(subtract_counts(self.rollouts.count_sealed(), self.progress.settled).values())

    def _find_work_limit(self) -> float:
        """Return how long no turn and no episode may end: an agent program may work for long between two turns."""
        domains = self.context.recipe.domains.values()
        return max(self.context.stall_s, *(one.episode_timeout_s for one in domains if is_program_domain(one)), 0.0)

    def _follow_curriculum(self) -> None:
        """Draw tasks by the new weights of the curriculum, if there are any."""
        if self.curriculum is not None and (weights := self.curriculum.poll_weights(now=loop_time())) is not None:
            self.task_queue.set_weights(weights)
            self.context.events.emit(CurriculumUpdated(weights=weights))

    async def _start_groups(self) -> None:
        """Start all groups that are admitted now."""
        groups = self.accounts.groups
        admitted = self.admission.num_admitted(
            groups,
            num_unsealed=self.rollouts.num_unsealed,
            sealed=self.rollouts.count_sealed(),
            settled=self.progress.settled,
            now=loop_time(),
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
            self.runner.start_group(task)
            await asyncio.sleep(0)  # thousands may start at once: let running episodes continue in between

    def _is_served(self) -> bool:
        return self.admission.has_fresh_weights(self.router.versions(), newest=self.progress.newest_version)

    def _continue_evaluation(self) -> None:
        """Continue the evaluation, if there is one, in the room that training leaves."""
        if self.evaluator is not None:
            max_running = compute_share(self.context.recipe.rollout.max_running, _identify_worker(self.context))
            room = max_running - self.accounts.groups.num_running
            self.evaluator.poll(version=self.progress.newest_version, room=room, now=loop_time())

    def _write_hold(self) -> None:
        """Ask the trainer to delay a version that would make running episodes too old, where that is worth it."""
        max_lag = self.context.recipe.rollout.max_lag
        limit = self.accounts.in_flight.limit(newest=self.progress.newest_version, max_lag=max_lag)
        if self.hold_writer.write(limit, now=loop_time()):
            self.wake_trainer()

    async def _drain(self) -> None:
        await self.runner.abort_all()
        if self.evaluator is not None:
            await self.evaluator.close()
        await self.scorer.close()
        await self.task_queue.close()
        self.accounts.record_sealed(await self.rollouts.close())
        self.accounts.close()
        self.reporter.report()


def make_env_worker(
    context: WorkerContext,
    *,
    router: Router,
    layout: ConversationLayout | None,
    rollouts: RolloutSpool,
    template: ChatTemplate | None = None,
    open_env: EnvOpener = open_env,
    wakeups: WakeEvent | None = None,
    wake_trainer: Callable[[], object] = do_nothing,
) -> EnvWorker:
    """Make an env worker that continues where its earlier run ended.

    `layout` is None if all domains are agent programs. With a `template`, thoughts are found in answers, and programs
    have an endpoint, `runner.player.proxy`, which the caller opens.
    """
    campaign, recipe = context.campaign, context.recipe
    wakeups = WakeEvent() if wakeups is None else wakeups
    runner = _make_runner(
        context,
        router=router,
        layout=layout,
        rollouts=rollouts,
        template=template,
        open_env=open_env,
        on_release=wakeups.set,
    )
    scorer = _make_scorer(context)
    held_out = HeldOutPlayer(player=runner.player, open_env=open_env, scorer=scorer, forget=router.forget)
    return EnvWorker(
        context=context,
        router=router,
        runner=runner,
        progress=runner.progress,
        task_queue=runner.task_queue,
        accounts=runner.accounts,
        admission=runner.admission,
        rollouts=rollouts,
        reporter=runner.reporter,
        curriculum=Curriculum.from_recipe(recipe, events=campaign.events),
        follower=TrainingFollower(campaign, accounts=runner.accounts),
        hold_writer=HoldWriter(campaign.hold(context.index)),
        scorer=scorer,
        evaluator=_make_evaluator(context, held_out, router) if recipe.evaluation.every_versions else None,
        wakeups=wakeups,
        wake_trainer=wake_trainer,
    )


def _make_runner(
    context: WorkerContext,
    *,
    router: Router,
    layout: ConversationLayout | None,
    rollouts: RolloutSpool,
    template: ChatTemplate | None,
    open_env: EnvOpener,
    on_release: Callable[[], None],
) -> EpisodeRunner:
    campaign, recipe, worker = context.campaign, context.recipe, _identify_worker(context)
    progress = TrainerProgress(weights=campaign.weights, settled=campaign.settled)
    journal = TaskJournal(campaign.journal(context.index))
    task_sets = TaskSets(recipe, worker, directory=campaign.tasks, num_drawn=journal.state.draws.rows)
    task_queue = _make_task_queue(context, journal=journal, task_sets=task_sets, open_env=open_env)
    admission = AdmissionControl(recipe, worker)
    accounts = EpisodeAccounts(
        _make_groups(recipe.rollout),
        journal=journal,
        return_task=task_queue.return_task,
        emit=context.events.emit,
        find_oldest_start=lambda newest: admission.find_oldest_start(router.versions(), newest=newest),
    )
    policy = CountingPolicy(router, on_turn=lambda episode, completion: runner.record_turn(episode, completion))
    player = _make_player(
        context,
        policy,
        router=router,
        layout=layout,
        template=template,
        task_queue=task_queue,
        read_fields=task_sets.read_fields,
        progress=progress,
        admission=admission,
    )
    reporter = EpisodeReporter(
        recipe.domains,
        groups=accounts.groups,
        policy=policy,
        task_queue=task_queue,
        emit=context.events.emit,
        num_workers=worker.count,
    )
    runner = EpisodeRunner(
        player=player,
        progress=progress,
        task_queue=task_queue,
        accounts=accounts,
        admission=admission,
        quick_scorer=QuickScorer(recipe, model=campaign.model),
        rollouts=rollouts,
        reporter=reporter,
        forget=router.forget,
        on_release=on_release,
    )
    return runner


def _make_player(
    context: WorkerContext,
    policy: CountingPolicy,
    *,
    router: Router,
    layout: ConversationLayout | None,
    template: ChatTemplate | None,
    task_queue: TaskQueue,
    read_fields: ReadFields,
    progress: TrainerProgress,
    admission: AdmissionControl,
) -> EpisodePlayer:
    recipe = context.recipe
    read_answer = proxy = None
    if template is not None:
        read_answer = make_thought_reader(context, template)
        if task_queue.program_domains:
            proxy = make_proxy(context, policy, template=template)
    return EpisodePlayer(
        recipe=recipe,
        layout=layout,
        policy=policy,
        task_queue=task_queue,
        read_fields=read_fields,
        context_length=read_context_length(context.campaign.model, max_model_len=recipe.engine.max_model_len),
        newest_version=lambda: progress.newest_version,
        producer=context.name,
        read_answer=read_answer,
        proxy=proxy,
        engine_versions=router.versions,
        find_needed_version=admission.find_needed_version,
    )


def _identify_worker(context: WorkerContext) -> EnvWorkerId:
    return EnvWorkerId(context.index, context.role_plan.num_workers)


def _make_groups(rollout: RolloutConfig) -> EpisodeGroups:
    return EpisodeGroups(
        group_size=rollout.group_size,
        episodes_per_group=rollout.episodes_per_group,
        replacements=rollout.replacements,
        max_lag=rollout.max_lag,
        late_after_s=rollout.late_after_s,
    )


def _make_task_queue(
    context: WorkerContext, *, journal: TaskJournal, task_sets: TaskSets, open_env: EnvOpener
) -> TaskQueue:
    recipe = context.recipe
    stream = TaskStream(
        _identify_worker(context),
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
        open_env=open_env,
    )


def _make_scorer(context: WorkerContext) -> TrajectoryScorer:
    concurrency, num_cpus = context.recipe.reward.concurrency, context.role_plan.cpus_per_worker
    return TrajectoryScorer(RewardProcess(context.campaign.root, concurrency=concurrency, num_cpus=num_cpus))


def _make_evaluator(context: WorkerContext, held_out: HeldOutPlayer, router: Router) -> EvaluationRunner:
    return EvaluationRunner(
        context.recipe,
        _identify_worker(context),
        job=context.job.number,
        record=EvaluationStore(context.campaign.evaluations),
        hooks=EvaluationHooks(
            play=held_out.play,
            score=held_out.score,
            emit=context.events.emit,
            oldest_version=lambda: min(router.versions(), default=-1),
        ),
    )


def _find_durable(context: WorkerContext, groups: Collection[str]) -> set[str]:
    """Return those of these groups, which an earlier run of this worker released, that are trained or in the spool."""
    campaign = context.campaign
    consumed = read_consumed_groups(campaign.checkpoints)
    present = list_last_groups(campaign.spool("rollouts"), worker=f"env-{context.index}")
    return {group for group in groups if group in consumed or group in present}
