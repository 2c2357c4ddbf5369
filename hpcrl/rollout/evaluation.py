"""One env host's part in evaluations: held-out episodes of low priority, whose trajectories are scored and let go.

    Evaluator    which of them this host plays, and when; host 0 also begins the rounds and concludes them

Nothing of an evaluation enters a spool or the accounts of training: its episodes are only counted here. They take
the room that training leaves, and one episode at a time where it leaves none.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from hpcrl.campaign_dir.events import CampaignEvent, EvaluationFinished, FaultReported
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Domain, Recipe
from hpcrl.errors import EnvFault
from hpcrl.learn.evaluations import Evaluations, Part, Result, Round, due, merged
from hpcrl.rollout.tasks import Task, held_out
from hpcrl.spool.record import TRAINABLE, Trajectory

LOOK_S = 0.5
"""How often the directory is looked at."""
REST_S = 30.0
"""How long nothing is done after a disk failed."""
ENGINES_S = 30.0
"""How long a round waits for all engines to serve its version; the result says which ones really acted."""

Play = Callable[[Task, int, str, Domain], Awaitable[Trajectory]]
"""Runs the episode of this index of a held-out task, in a domain of this name."""
Score = Callable[[str, Trajectory], Awaitable[float]]


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What an evaluator needs done; the env host does it."""

    play: Play
    score: Score
    emit: Callable[[CampaignEvent], None]
    served: Callable[[], int]
    """The oldest version that engines serve."""


@dataclass
class _Share:
    """This host's part of the round that goes on."""

    round: Round
    began: float
    waiting: deque[tuple[str, int]]
    rewards: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: int = 0
    num_faults: int = 0
    versions: list[int] = field(default_factory=list)

    def part(self) -> Part:
        return Part(
            rewards=self.rewards,
            num_tokens=self.num_tokens,
            num_faults=self.num_faults,
            oldest=min(self.versions, default=None),
            newest=max(self.versions, default=None),
        )


class Evaluator:
    """The evaluations of one env host; `tend` it often, `close` it at the end."""

    def __init__(self, recipe: Recipe, worker: EnvWorkerId, *, job: int, record: Evaluations, doing: Doing) -> None:
        self._recipe = recipe
        self._worker = worker
        self._job = job
        self._record = record
        self._doing = doing
        self._domains = evaluated(recipe)
        self._last: Result | None = None
        """What was concluded last, as far as host 0 knows."""
        self._share: _Share | None = None
        self._playing: set[asyncio.Task[None]] = set()
        self._looked = self._rests_until = float("-inf")

    def tend(self, *, version: int, room: int, now: float) -> None:
        """Begin what may begin. `version` is the newest; `room` is how many episodes training leaves room for."""
        if now < self._rests_until:
            return
        try:
            self._tend(version=version, room=room, now=now)
        except OSError as error:  # a disk that is full or fails must not end what trains
            self._rests_until = now + REST_S
            self._doing.emit(FaultReported(what="evaluation", detail=f"{error}: tried again in {REST_S:g} s"))

    def _tend(self, *, version: int, room: int, now: float) -> None:
        if now - self._looked >= LOOK_S:
            self._looked = now
            if self._worker.index == 0:
                self._lead(version)
            self._take_share(now)
        share = self._share
        if share is None or not self._engines_ready(share, now):
            return
        while share.waiting and len(self._playing) < max(room, 1):
            name, index = share.waiting.popleft()
            episode = asyncio.create_task(self._episode(share, name, index))
            self._playing.add(episode)
            episode.add_done_callback(self._playing.discard)
        if not share.waiting and not self._playing:
            self._record.leave(share.part(), round=share.round, host=self._worker.index)
            self._share = None

    async def close(self) -> None:
        """A round that is interrupted has no result; the next job begins another."""
        for episode in self._playing:
            episode.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    def _lead(self, version: int) -> None:
        """Host 0: conclude the round that has all its parts, begin the one that is due."""
        record, round = self._record, self._record.round()
        if self._last is None:
            self._last = record.last()
        if round is not None and round.job == self._job and not record.has_result(round):
            parts = record.parts(round, num_hosts=self._worker.count)
            if parts is not None:
                self._conclude(merged(round, parts))
        elif due(self._last, newest=version, every=self._recipe.evaluation.every_versions):
            record.begin(job=self._job, version=version)

    def _conclude(self, result: Result) -> None:
        # Told first: a host that dies in between tells it again, under the same number.
        self._doing.emit(EvaluationFinished(**msgspec.structs.asdict(result)))
        self._record.conclude(result)
        self._last = result

    def _take_share(self, now: float) -> None:
        """Begin this host's part of the round that goes on, unless it is done or under way."""
        if self._share is not None:
            return
        round = self._record.round()
        if round is None or round.job != self._job or self._record.has_part(round, host=self._worker.index):
            return
        every = [(name, index) for name in self._domains for index in range(self._recipe.evaluation.num_episodes)]
        self._share = _Share(round=round, began=now, waiting=deque(every[self._worker.index :: self._worker.count]))

    def _engines_ready(self, share: _Share, now: float) -> bool:
        return self._doing.served() >= share.round.version or now - share.began > ENGINES_S

    async def _episode(self, share: _Share, name: str, index: int) -> None:
        task = held_out(name, recipe_seed=self._recipe.seed, round=share.round.number, index=index)
        try:
            trajectory = await self._doing.play(task, index, name, self._domains[name])
            reward = await self._reward(name, trajectory)
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything; one episode must not end a run
            share.num_faults += 1
            detail = f"{type(error).__name__}: {error}"
            self._doing.emit(FaultReported(what="evaluation", detail=detail, id=task.episode(index)))
            return
        share.rewards.setdefault(name, []).append(reward)
        share.num_tokens += len(trajectory)
        share.versions += {int(version) for version in trajectory.versions[trajectory.loss_mask]}

    async def _reward(self, name: str, trajectory: Trajectory) -> float:
        """What a trajectory earned; one that ended in a fault, or whose reward is no number, says nothing."""
        if trajectory.status not in TRAINABLE:
            raise EnvFault(f"{trajectory.status}: {trajectory.extra.get('fault', 'no reason was given')}")
        reward = await self._doing.score(name, msgspec.structs.replace(trajectory, domain=name))
        if not math.isfinite(reward):
            raise EnvFault(f"{self._domains[name].reward} gave {reward}: a reward must be a finite number")
        return reward


def evaluated(recipe: Recipe) -> dict[str, Domain]:
    """The domains that are evaluated, with the options that their environments have then."""
    names = recipe.evaluation.domains or list(recipe.domains)
    more = recipe.evaluation.options
    return {
        name: msgspec.structs.replace(
            recipe.domains[name], options={**recipe.domains[name].options, **more.get(name, {})}
        )
        for name in names
    }
