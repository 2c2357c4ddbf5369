"""Role env: a host of many episodes, each on its own timeline; whole groups go to the spool "rollouts"."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from hpcrl.campaign_dir.endpoints import Endpoint
from hpcrl.campaign_dir.events import CurriculumUpdated, FaultReported
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Domain
from hpcrl.engines.base import Completion, Engine
from hpcrl.engines.http import RemoteEngine, client_session
from hpcrl.envs.base import Env
from hpcrl.envs.pool import open_env
from hpcrl.errors import SpoolError
from hpcrl.learn.evaluations import Evaluations
from hpcrl.models.chat_layout import load_chat, load_template
from hpcrl.models.model_config import read_context_length
from hpcrl.roles.context import Context
from hpcrl.rollout.admission import Gate, share
from hpcrl.rollout.agents.server import Proxy
from hpcrl.rollout.curriculum import Curriculum
from hpcrl.rollout.episode import Layout, now
from hpcrl.rollout.evaluation import Doing, Evaluator
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.flow_control import Telling, UnderWay, read_settled
from hpcrl.rollout.groups import Ending, Groups
from hpcrl.rollout.journal import Journal, reserve_block
from hpcrl.rollout.player import Player
from hpcrl.rollout.reporting import Counted, EpisodeReporter
from hpcrl.rollout.rewards import load_reward, parts_of
from hpcrl.rollout.routing.factory import make_router
from hpcrl.rollout.routing.router import Router
from hpcrl.rollout.task_queue import Agenda
from hpcrl.rollout.tasks import Task, TaskStream, stable_hash
from hpcrl.spool.listing import Listing, counted
from hpcrl.spool.record import Trajectory
from hpcrl.spool.writer import Batching, BatchWriter, DiskSpoolWriter
from hpcrl.weights.versions import newest_version

POLL_S = 0.1
TASKS_PER_BLOCK = 1 << 32


def run(context: Context) -> None:
    """Run episodes until the job ends."""
    asyncio.run(_host(context))


async def _host(context: Context) -> None:
    while newest_version(context.run.weights) is None:  # the trainer makes model directory and first version
        if context.draining:
            return
        await asyncio.sleep(POLL_S)
    async with client_session() as session:

        def connect(endpoint: Endpoint) -> Engine:
            return RemoteEngine(endpoint, session)

        seed = stable_hash(context.recipe.seed, context.name, bits=31)
        async with make_router(
            context.recipe, context.run, host=context.index, connect=connect, seed=seed, events=context.events
        ) as router:
            host = Host(context, router=router, layout=load_chat(context.run.model), rollouts=_on_disk(context))
            async with contextlib.AsyncExitStack() as stack:
                if host.agenda.programs:
                    proxy = Proxy(host.policy, template=load_template(context.run.model))
                    host.player.proxy = await stack.enter_async_context(proxy)
                await host.live()


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The spool "rollouts" as an env worker uses it."""

    writer: BatchWriter
    num_sealed: Callable[[], int]
    """How many trajectories of all env workers are durable."""


@dataclass
class Host:
    """The episodes of one env worker and their accounts."""

    context: Context
    router: Router
    layout: Layout
    rollouts: Rollouts
    open_env: Callable[[str, Domain], Awaitable[Env]] = open_env
    version: int = 0
    num_unsealed: int = 0
    """Trajectories that were released and are not durable yet."""
    episodes: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    under_way: UnderWay = field(default_factory=UnderWay)

    def __post_init__(self) -> None:
        context, rollout = self.context, self.context.recipe.rollout
        self.groups = Groups(
            group_size=rollout.group_size,
            episodes_per_group=rollout.episodes_per_group,
            replacements=rollout.replacements,
            max_lag=rollout.max_lag,
        )
        self.policy = Counted(self.router, acted=self._acted)
        self.player = Player(
            recipe=context.recipe,
            layout=self.layout,
            policy=self.policy,
            context_length=_context_length(context),
            newest_version=lambda: self.version,
            producer=context.name,
        )
        self.worker = EnvWorkerId(context.index, context.role_plan.num_workers)
        self.agenda = Agenda(
            context.recipe.domains,
            tasks=TaskStream(
                self.worker,
                recipe_seed=context.recipe.seed,
                start=reserve_block(context.run.task_blocks, host=context.index) * TASKS_PER_BLOCK,
            ),
            budget=FaultBudget(most=rollout.max_env_faults),
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
            agenda=self.agenda,
            emit=context.events.emit,
        )
        self.curriculum = Curriculum.of(context.recipe, events=context.run.events)
        self.gate = Gate(context.recipe, self.worker)
        self.journal = Journal(context.run.journal(context.index))
        self.telling = Telling(context.run.word(context.index))
        self.evaluator = _evaluator(self) if context.recipe.evaluation.every_versions else None

    async def live(self) -> None:
        """Admit, seal, report, until the job ends; then abort what runs and seal what is there."""
        self._recover()
        while not self.context.draining:
            self.version = max(self.version, newest_version(self.context.run.weights) or 0)
            await self._begin_groups()
            self._evaluate()
            self._tell()
            await self._seal(self.rollouts.writer.flush_due)
            self.reporter.report_due(now=now())
            await asyncio.sleep(POLL_S)
        for task in self.episodes.values():
            task.cancel()
        await asyncio.gather(*self.episodes.values(), return_exceptions=True)
        if self.evaluator is not None:
            await self.evaluator.close()
        await self.agenda.close()
        await self._seal(self.rollouts.writer.close)
        self.reporter.report()
        self.journal.close()

    def _recover(self) -> None:
        """Book what an earlier life of this host was running when it was killed."""
        self.reporter.lose_episodes(self.groups.accounts.lose(self.journal.open()))

    async def _begin_groups(self) -> None:
        """Begin as many groups as may begin now, by the weights of the curriculum if there is one."""
        if self.curriculum is not None and (weights := self.curriculum.weights(now=now())) is not None:
            self.agenda.reweigh(weights)
            self.context.events.emit(CurriculumUpdated(weights=weights))
        waiting = self.rollouts.num_sealed() - self._settled()
        admitted = self.gate.admitted(self.groups, num_unsealed=self.num_unsealed, num_waiting=waiting)
        if admitted and not self._is_served():
            await self.router.refresh()
            if not self._is_served():
                return
        for _ in range(self.gate.opened(admitted, self.groups)):
            task = self.agenda.next(now=now())
            if task is None:
                return
            self._begin(task)
            await asyncio.sleep(0)  # thousands may begin at once: those that run already want their turn too

    def _is_served(self) -> bool:
        return self.gate.is_served(self.router.versions(), newest=self.version)

    def _evaluate(self) -> None:
        """Go on with the evaluation, if there is one, in the room that training leaves."""
        if self.evaluator is not None:
            most = share(self.context.recipe.rollout.max_running, self.worker)
            self.evaluator.tend(version=self.version, room=most - self.groups.num_running, now=now())

    def _settled(self) -> int:
        """How many are settled; a version that is on its way out is known by it."""
        settled = read_settled(self.context.run.settled)
        self.version = max(self.version, settled.version)
        return settled.num

    def _begin(self, task: Task) -> None:
        """Begin a group; its episodes go their own ways from here."""
        self.journal.begun(self.groups.begin(task.group))
        self._begin_episodes(task, range(self.context.recipe.rollout.episodes_per_group))

    def _begin_episodes(self, task: Task, indices: Iterable[int]) -> None:
        for index in indices:
            episode = task.episode(index)
            self.under_way.begin(episode, version=self.version)
            self.episodes[episode] = asyncio.create_task(self._episode(task, index), name=episode)

    async def _episode(self, task: Task, index: int) -> None:
        episode = task.episode(index)
        try:
            async with self.agenda.place(task):
                trajectory = await self._run(task, index)
            while not self.rollouts.writer.has_room:  # the disk is slower than we are, or full: hold still
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.under_way.drop(episode)
            self.groups.aborted(task.group, episode)
            self.agenda.closed(task)
            self.journal.ended(episode, running=self.groups.accounts.running)
            return
        finally:
            del self.episodes[episode]
            self.router.forget(episode)
        self._book(task, trajectory)

    async def _run(self, task: Task, index: int) -> Trajectory:
        """An episode of training."""
        domain = self.context.recipe.domains[task.domain]
        return await self.player.play(
            domain, task, index, make_env=lambda: self.agenda.env(task), limits=self.player.limits(domain)
        )

    async def play_held_out(self, task: Task, index: int, name: str, domain: Domain) -> Trajectory:
        """An episode of an evaluation: no version is too old for it."""
        limits = msgspec.structs.replace(
            self.player.limits(domain), max_lag=sys.maxsize, temperature=self.context.recipe.evaluation.temperature
        )
        try:
            async with self.agenda.place(msgspec.structs.replace(task, domain=name)):
                return await self.player.play(
                    domain, task, index, make_env=lambda: self.open_env(name, domain), limits=limits
                )
        finally:
            self.router.forget(task.episode(index))

    def _book(self, task: Task, trajectory: Trajectory) -> None:
        ending = self.groups.end(trajectory, newest=self.version)
        self.under_way.end(trajectory.id, ending)
        if ending is None:
            return
        self.journal.ended(trajectory.id, running=self.groups.accounts.running)
        self.reporter.end_episode(trajectory, ending.status, now=now())
        for kept in ending.released:
            self.rollouts.writer.append(kept)
        self.num_unsealed += len(ending.released)
        for episode in [*ending.abort, *self._spared(ending)]:
            self.episodes[episode].cancel()
        if ending.begin:
            self.journal.begun([task.episode(index) for index in ending.begin])
            self._begin_episodes(task, ending.begin)
        if ending.released or ending.lost:
            self.agenda.closed(task)

    def _spared(self, ending: Ending) -> list[str]:
        """The episodes of the groups to spare, once the batch has what it needs."""
        if not (ending.released and self.gate.released()):
            return []
        aborted, dropped = self.groups.give_up()
        for episode in dropped:
            self.under_way.drop(episode)
        return aborted

    def _acted(self, episode: str, completion: Completion) -> None:
        self.under_way.acted(episode, version=min(completion.versions, default=self.version))

    async def _seal(self, flush: Callable[[], list[str]]) -> None:
        """Make trajectories durable in a thread. A full disk loses nothing that is held; it is asked less and less."""
        try:
            sealed = await asyncio.to_thread(flush)
        except SpoolError as error:
            self.context.events.emit(FaultReported(what="spool", detail=str(error)))
        else:
            self.num_unsealed -= len(sealed)  # not in one line with the wait: episodes end meanwhile and add to it
            for episode in sealed:
                self.under_way.drop(episode)

    def _tell(self) -> None:
        """Ask training not to make too old what is under way, as far as that is worth it."""
        max_lag = self.context.recipe.rollout.max_lag
        self.telling.tell(self.under_way.limit(newest=self.version, max_lag=max_lag), now=now())


def _context_length(context: Context) -> int:
    return read_context_length(context.run.model, max_model_len=context.recipe.engine.max_model_len)


def _evaluator(host: Host) -> Evaluator:
    """This host's evaluator. Scores are computed here, each in a thread: there are few of them."""
    context = host.context
    model, domains = context.run.model, context.recipe.domains
    rewards = {name: load_reward(name, domain, model=model) for name, domain in domains.items()}

    async def score(name: str, trajectory: Trajectory) -> float:
        return sum(parts_of(await asyncio.to_thread(rewards[name], trajectory)).values())

    return Evaluator(
        context.recipe,
        host.worker,
        job=context.job.number,
        record=Evaluations(context.run.evaluations),
        doing=Doing(
            play=host.play_held_out,
            score=score,
            emit=context.events.emit,
            served=lambda: min(host.router.versions(), default=-1),
        ),
    )


def _on_disk(context: Context) -> Rollouts:
    rollout, spool, directory = context.recipe.rollout, context.recipe.spool, context.run.spool("rollouts")
    batching = Batching(
        max_bytes=spool.max_segment_mib << 20, max_count=rollout.group_size * 64, max_age_s=spool.seal_after_s
    )
    listing = Listing(directory)
    writer = DiskSpoolWriter(directory, producer=context.name, batching=batching, compression=spool.compression)
    return Rollouts(writer=writer, num_sealed=lambda: counted(listing.names()))
