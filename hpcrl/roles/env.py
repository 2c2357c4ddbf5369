"""Role env: a host of many episodes, each on its own timeline; whole groups go to the spool "rollouts"."""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hpcrl.endpoints import Endpoint
from hpcrl.engines.base import GenerateRequest, Generator
from hpcrl.engines.chat import Chat, load_chat
from hpcrl.engines.http import RemoteEngine, client_session
from hpcrl.envs.base import Env, make_env
from hpcrl.errors import SpoolError
from hpcrl.files import read_json
from hpcrl.recipe import Domain
from hpcrl.roles.context import Context
from hpcrl.rollout.admission import admitted_groups
from hpcrl.rollout.episode import Limits, run_episode
from hpcrl.rollout.group import Groups
from hpcrl.rollout.router import Router
from hpcrl.rollout.tasks import Task, TaskStream, stable_hash
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

        def connect(endpoint: Endpoint) -> Generator:
            return RemoteEngine(endpoint, session)

        seed = stable_hash(context.recipe.seed, context.name, bits=31)
        async with Router(directory=context.run.endpoints, connect=connect, seed=seed) as router:
            host = Host(context, router=router, chat=load_chat(context.run.model))
            await host.live()


@dataclass
class Host:
    """The episodes of one env worker and their accounts."""

    context: Context
    router: Router
    chat: Chat
    version: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    num_remote_prefills: int = 0
    by_domain: dict[str, Counter[str]] = field(default_factory=dict)
    episodes: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    reported: dict[str, Any] = field(default_factory=dict)
    reported_at: float = 0.0

    def __post_init__(self) -> None:
        context, rollout, spool = self.context, self.context.recipe.rollout, self.context.recipe.spool
        self.groups = Groups(group_size=rollout.group_size, redundancy=rollout.redundancy)
        self.context_length = int(read_json(context.run.model / "config.json")["max_position_embeddings"])
        self.num_hosts = context.role_plan.num_workers
        self.tasks = TaskStream(
            {name: domain.weight for name, domain in context.recipe.domains.items()},
            recipe_seed=context.recipe.seed,
            host=context.index,
            num_hosts=self.num_hosts,
            start=_reserve_tasks(context),
        )
        self.sealed = Listing(context.run.spool("rollouts"))
        self.spool = DiskSpoolWriter(
            context.run.spool("rollouts"),
            producer=context.name,
            batching=Batching(
                max_bytes=spool.max_segment_mib << 20,
                max_count=rollout.group_size * 64,
                max_age_s=spool.seal_after_s,
            ),
            compression=spool.compression,
        )

    async def live(self) -> None:
        """Admit, seal, report, until the job ends; then abort what runs and seal what is there."""
        while not self.context.draining:
            self.version = max(self.version, newest_version(self.context.run.weights) or 0)
            for _ in range(self._admitted()):
                self._begin(next(self.tasks))
            await self._seal(self.spool.flush_due)
            self._report()
            await asyncio.sleep(POLL_S)
        for task in self.episodes.values():
            task.cancel()
        await asyncio.gather(*self.episodes.values(), return_exceptions=True)
        await self._seal(self.spool.close)
        self.reported_at = 0.0
        self._report()

    def _admitted(self) -> int:
        """How many groups may begin now. What is durable and not settled by the trainer waits in the spools."""
        rollout, train = self.context.recipe.rollout, self.context.recipe.train
        waiting = counted(self.sealed.names()) - self._settled()
        return admitted_groups(
            host=self.context.index,
            num_hosts=self.num_hosts,
            max_running=rollout.max_running,
            episodes_per_group=rollout.group_size + rollout.redundancy,
            running_episodes=self.groups.num_running,
            running_groups=self.groups.num_open,
            max_lag=rollout.max_lag,
            version=0,  # what the trainer consumed is in neither count, so that both begin anew at every step
            groups_per_step=train.groups_per_step,
            accepted_groups=max(waiting, 0) // rollout.group_size,
        )

    def _settled(self) -> int:
        try:
            return int(read_json(self.context.run.settled)["num"])
        except FileNotFoundError:
            return 0

    def _begin(self, task: Task) -> None:
        """Begin a group; its episodes go their own ways from here."""
        for index, episode in enumerate(self.groups.begin(task.group)):
            self.episodes[episode] = asyncio.create_task(self._episode(task, index), name=episode)

    async def _episode(self, task: Task, index: int) -> None:
        episode = task.episode(index)
        domain = self.context.recipe.domains[task.domain]
        try:
            trajectory = await run_episode(
                task,
                index=index,
                make_env=lambda: _make(task.domain, domain),
                layout=self.chat,
                policy=self,
                limits=self._limits(domain),
                newest_version=lambda: self.version,
                producer=self.context.name,
            )
            while not self.spool.has_room:  # the disk is slower than we are, or full: hold still
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.groups.aborted(task.group, episode)
            return
        finally:
            del self.episodes[episode]
        self._book(trajectory)

    def _book(self, trajectory: Trajectory) -> None:
        ending = self.groups.end(trajectory)
        if ending is None:
            return
        if trajectory.extra.get("fault"):
            self.context.events.emit("fault", what=ending.status, detail=trajectory.extra["fault"], id=trajectory.id)
        self.by_domain.setdefault(trajectory.domain, Counter())[ending.status] += 1
        for kept in ending.released:
            self.spool.append(kept)
        for episode in ending.abort:
            self.episodes[episode].cancel()

    async def generate(self, request: GenerateRequest) -> Any:
        """One turn, through the router, counted."""
        completion = await self.router.generate(request)
        self.num_turns += 1
        self.num_tokens += len(completion.token_ids)
        self.num_remote_prefills += completion.remote_prefill
        return completion

    async def abort(self, request_id: str) -> None:
        await self.router.abort(request_id)

    def _limits(self, domain: Domain) -> Limits:
        rollout = self.context.recipe.rollout
        return Limits(
            max_turns=domain.max_turns,
            max_new_tokens=rollout.max_new_tokens,
            context_length=self.context_length,
            max_lag=rollout.max_lag,
            temperature=rollout.temperature,
            reset_timeout_s=domain.reset_timeout_s,
            step_timeout_s=domain.step_timeout_s,
            env_retries=domain.env_retries,
        )

    async def _seal(self, flush: Any) -> None:
        """Make trajectories durable in a thread. A full disk loses nothing that is held; it is asked less and less."""
        try:
            await asyncio.to_thread(flush)
        except SpoolError as error:
            self.context.events.emit("fault", what="spool", detail=str(error))

    def _report(self) -> None:
        """The accounts so far, when they changed."""
        now = time.monotonic()
        if now - self.reported_at < REPORT_S:
            return
        endings = self.groups.endings
        counts = {
            "running": self.groups.num_running,
            **{status.replace("-", "_"): endings[status] for status in _STATUSES},
            "num_tokens": self.num_tokens,
            "turns": self.num_turns,
            "remote_prefills": self.num_remote_prefills,
            "by_domain": {name: dict(counter) for name, counter in self.by_domain.items()},
        }
        if counts != self.reported:
            self.context.events.emit("episodes", **counts)
            self.reported = counts
        self.reported_at = now


_STATUSES: tuple[Status, ...] = ("done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault")


def _make(name: str, domain: Domain) -> Env:
    return make_env(domain.env, domain.options, what=f"domains.{name}.env")


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
