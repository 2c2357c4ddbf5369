"""Role env: a host of many episodes, each on its own timeline; whole groups go to the spool "rollouts"."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hpcrl.endpoints import Endpoint
from hpcrl.engines.base import Engine, GenerateRequest, Part
from hpcrl.engines.chat import load_chat, load_template
from hpcrl.engines.http import RemoteEngine, client_session
from hpcrl.envs.base import Env, make_program
from hpcrl.envs.pool import open_env
from hpcrl.errors import SpoolError
from hpcrl.files import read_json
from hpcrl.recipe import Domain
from hpcrl.roles.context import Context
from hpcrl.rollout.admission import admitted_groups, in_batches, lag_of, share
from hpcrl.rollout.agenda import Agenda
from hpcrl.rollout.assembly import make_router
from hpcrl.rollout.budget import FaultBudget
from hpcrl.rollout.courses import whose
from hpcrl.rollout.curriculum import Curriculum
from hpcrl.rollout.episode import Layout, Limits, now, run_episode
from hpcrl.rollout.group import Ending, Groups
from hpcrl.rollout.journal import Journal
from hpcrl.rollout.program import run_program
from hpcrl.rollout.proxy import Proxy
from hpcrl.rollout.router import Router
from hpcrl.rollout.tasks import Task, TaskStream, stable_hash
from hpcrl.spool.batching import BatchWriter
from hpcrl.spool.names import Listing, counted
from hpcrl.spool.record import Status, Trajectory
from hpcrl.spool.spool import Batching, DiskSpoolWriter
from hpcrl.weights.versions import newest_version

POLL_S = 0.1
REPORT_S = 1.0
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
                    proxy = Proxy(host, template=load_template(context.run.model))
                    host.proxy = await stack.enter_async_context(proxy)
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
    proxy: Proxy | None = None
    """Of agent programs, if there are any."""
    version: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    num_remote_prefills: int = 0
    num_unsealed: int = 0
    """Trajectories that were released and are not durable yet."""
    by_domain: dict[str, Counter[str]] = field(default_factory=dict)
    episodes: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    reported: dict[str, Any] = field(default_factory=dict)
    reported_at: float = 0.0

    def __post_init__(self) -> None:
        context, rollout = self.context, self.context.recipe.rollout
        self.groups = Groups(
            group_size=rollout.group_size,
            redundancy=rollout.redundancy,
            replacements=rollout.replacements,
            max_lag=rollout.max_lag,
        )
        model_sees = int(read_json(context.run.model / "config.json")["max_position_embeddings"])
        self.context_length = min(model_sees, context.recipe.engine.max_model_len or model_sees)
        self.num_hosts = context.role_plan.num_workers
        self.agenda = Agenda(
            context.recipe.domains,
            tasks=TaskStream(
                recipe_seed=context.recipe.seed,
                host=context.index,
                num_hosts=self.num_hosts,
                start=_reserve_tasks(context),
            ),
            budget=FaultBudget(most=rollout.max_env_faults),
            groups_ahead=rollout.groups_ahead,
            episodes_per_group=rollout.group_size + rollout.redundancy,
            cpus=context.role_plan.cpus_per_worker,
            mem_gib=context.role_plan.mem_gib_per_worker,
            open_env=self.open_env,
        )
        self.curriculum = Curriculum.of(context.recipe, events=context.run.events)
        self.journal = Journal(context.run.journal(context.index))

    async def live(self) -> None:
        """Admit, seal, report, until the job ends; then abort what runs and seal what is there."""
        self._recover()
        while not self.context.draining:
            self.version = max(self.version, newest_version(self.context.run.weights) or 0)
            self._begin_groups()
            await self._seal(self.rollouts.writer.flush_due)
            self._report()
            await asyncio.sleep(POLL_S)
        for task in self.episodes.values():
            task.cancel()
        await asyncio.gather(*self.episodes.values(), return_exceptions=True)
        await self.agenda.close()
        await self._seal(self.rollouts.writer.close)
        self.reported_at = 0.0
        self._report()
        self.journal.close()

    def _recover(self) -> None:
        """Book what an earlier life of this host was running when it was killed."""
        num_lost = self.groups.accounts.lose(self.journal.open())
        if num_lost:
            detail = f"{num_lost} episodes were lost with an earlier life of this env worker"
            self.context.events.emit("fault", what="env-fault", detail=detail)

    def _begin_groups(self) -> None:
        """Begin as many groups as may begin now, by the weights of the curriculum if there is one."""
        if self.curriculum is not None and (weights := self.curriculum.weights(now=now())) is not None:
            self.agenda.reweigh(weights)
            self.context.events.emit("curriculum", weights=weights)
        for _ in range(self._admitted()):
            task = self.agenda.next(now=now())
            if task is None:
                return
            self._begin(task)

    def _admitted(self) -> int:
        """How many groups may begin now. What is durable and not settled by the trainer waits in the spools."""
        rollout, train = self.context.recipe.rollout, self.context.recipe.train
        waiting = self.rollouts.num_sealed() - self._settled()
        under_way = self.groups.num_open + self.num_unsealed // rollout.group_size
        admitted = admitted_groups(
            host=self.context.index,
            num_hosts=self.num_hosts,
            max_running=rollout.max_running,
            episodes_per_group=rollout.group_size + rollout.redundancy,
            running_episodes=self.groups.num_running,
            running_groups=under_way,
            max_lag=lag_of(rollout.mode, max_lag=rollout.max_lag),
            version=0,  # what the trainer consumed is in neither count, so that both begin anew at every step
            groups_per_step=train.groups_per_step,
            accepted_groups=max(waiting, 0) // rollout.group_size,
        )
        if rollout.mode != "one-step-off":
            return admitted
        batch = share(train.groups_per_step, host=self.context.index, num_hosts=self.num_hosts)
        return in_batches(admitted, under_way=under_way, batch=batch)

    def _settled(self) -> int:
        try:
            return int(read_json(self.context.run.settled)["num"])
        except FileNotFoundError:
            return 0

    def _begin(self, task: Task) -> None:
        """Begin a group; its episodes go their own ways from here."""
        self.journal.begun(self.groups.begin(task.group))
        rollout = self.context.recipe.rollout
        self._begin_episodes(task, range(rollout.group_size + rollout.redundancy))

    def _begin_episodes(self, task: Task, indices: Iterable[int]) -> None:
        for index in indices:
            episode = task.episode(index)
            self.episodes[episode] = asyncio.create_task(self._episode(task, index), name=episode)

    async def _episode(self, task: Task, index: int) -> None:
        episode = task.episode(index)
        try:
            async with self.agenda.place(task):
                trajectory = await self._run(task, index)
            while not self.rollouts.writer.has_room:  # the disk is slower than we are, or full: hold still
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.groups.aborted(task.group, episode)
            self.journal.ended(episode, running=self.groups.accounts.running)
            return
        finally:
            del self.episodes[episode]
            self.router.forget(episode)
        self._book(task, trajectory)

    async def _run(self, task: Task, index: int) -> Trajectory:
        """Turn by turn, or as the agent program wants it."""
        domain = self.context.recipe.domains[task.domain]
        if task.domain in self.agenda.programs:
            assert self.proxy is not None
            return await run_program(
                task,
                index=index,
                make_program=lambda: make_program(domain.env, domain.options, what=f"domains.{task.domain}.env"),
                proxy=self.proxy,
                limits=self._limits(domain),
                newest_version=lambda: self.version,
                producer=self.context.name,
            )
        return await run_episode(
            task,
            index=index,
            make_env=lambda: self.agenda.env(task),
            layout=self.layout,
            policy=self,
            limits=self._limits(domain),
            newest_version=lambda: self.version,
            producer=self.context.name,
        )

    def _book(self, task: Task, trajectory: Trajectory) -> None:
        ending = self.groups.end(trajectory, newest=self.version)
        if ending is None:
            return
        self.journal.ended(trajectory.id, running=self.groups.accounts.running)
        self.by_domain.setdefault(trajectory.domain, Counter())[ending.status] += 1
        self._judge(trajectory, ending)
        for kept in ending.released:
            self.rollouts.writer.append(kept)
        self.num_unsealed += len(ending.released)
        for episode in ending.abort:
            self.episodes[episode].cancel()
        if ending.begin:
            self.journal.begun([task.episode(index) for index in ending.begin])
            self._begin_episodes(task, ending.begin)
        if ending.released or ending.lost:
            self.agenda.closed(task)

    def _judge(self, trajectory: Trajectory, ending: Ending) -> None:
        """Name a fault in an event; an environment that has too many of them is left alone for a while."""
        fault = trajectory.extra.get("fault")
        if fault:
            self.context.events.emit("fault", what=ending.status, detail=fault, id=trajectory.id)
        failed = trajectory.status == "env-fault"
        pause_s = self.agenda.ended(trajectory.domain, fault=failed, now=now())
        if pause_s is not None:
            env = self.context.recipe.domains[trajectory.domain].env
            detail = f"{env} is paused for {pause_s:g} s: too many faults (rollout.max_env_faults), the last: {fault}"
            self.context.events.emit("fault", what="env-paused", detail=detail, domain=trajectory.domain)

    async def generate(self, request: GenerateRequest) -> Any:
        """One turn, through the router, counted."""
        completion = await self.router.generate(whose(request))
        self.num_turns += 1
        self.num_tokens += len(completion.token_ids)
        self.num_remote_prefills += completion.remote_prefill
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        """The same, told while it is said."""
        self.num_turns += 1
        async with contextlib.aclosing(self.router.stream(whose(request))) as pieces:
            async for piece in pieces:
                self.num_tokens += len(piece.token_ids)
                yield piece

    def _limits(self, domain: Domain) -> Limits:
        rollout = self.context.recipe.rollout
        return Limits(
            max_turns=domain.max_turns,
            max_new_tokens=rollout.max_new_tokens,
            context_length=self.context_length,
            max_lag=rollout.max_lag,
            temperature=rollout.temperature,
            create_timeout_s=domain.episode_timeout_s,  # the pool keeps the domain's own, from its turn to start
            reset_timeout_s=domain.reset_timeout_s,
            step_timeout_s=domain.step_timeout_s,
            episode_timeout_s=domain.episode_timeout_s,
            env_retries=domain.env_retries,
        )

    async def _seal(self, flush: Callable[[], list[str]]) -> None:
        """Make trajectories durable in a thread. A full disk loses nothing that is held; it is asked less and less."""
        try:
            sealed = await asyncio.to_thread(flush)
        except SpoolError as error:
            self.context.events.emit("fault", what="spool", detail=str(error))
        else:
            self.num_unsealed -= len(sealed)  # not in one line with the wait: episodes end meanwhile and add to it

    def _report(self) -> None:
        """The accounts so far, when they changed."""
        if now() - self.reported_at < REPORT_S:
            return
        endings = self.groups.endings
        counts = {
            "running": self.groups.num_running,
            **{status.replace("-", "_"): endings[status] for status in _STATUSES},
            "num_tokens": self.num_tokens,
            "turns": self.num_turns,
            "remote_prefills": self.num_remote_prefills,
            "groups_lost": self.groups.num_lost,
            "replaced": self.groups.num_replaced,
            "evicted": self.groups.num_evicted,
            "by_domain": {name: dict(counter) for name, counter in self.by_domain.items()},
        }
        if counts != self.reported:
            self.context.events.emit("episodes", **counts)
            self.reported = counts
        self.reported_at = now()


def _on_disk(context: Context) -> Rollouts:
    rollout, spool, directory = context.recipe.rollout, context.recipe.spool, context.run.spool("rollouts")
    batching = Batching(
        max_bytes=spool.max_segment_mib << 20, max_count=rollout.group_size * 64, max_age_s=spool.seal_after_s
    )
    listing = Listing(directory)
    writer = DiskSpoolWriter(directory, producer=context.name, batching=batching, compression=spool.compression)
    return Rollouts(writer=writer, num_sealed=lambda: counted(listing.names()))


_STATUSES: tuple[Status, ...] = ("done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault")


def _reserve_tasks(context: Context) -> int:
    """The first number of a block of tasks that no host and no earlier life of this one has used."""
    directory = context.run.task_blocks
    block = 0
    while True:
        try:
            os.close(os.open(directory / f"{context.index}-{block}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            block += 1
        else:
            return block * TASKS_PER_BLOCK
