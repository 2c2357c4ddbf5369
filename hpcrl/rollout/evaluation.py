"""Evaluation: one env worker's share of held-out episodes of low priority, which are scored and then discarded.

    EvaluationRunner             plays this worker's share; worker 0 also starts the rounds and concludes them
    EvaluationHooks              the calls it makes to the env worker
    PlayEpisode, ScoreTrajectory the types of two of them
    list_evaluated_domains       the domains that a recipe evaluates, with their options

No evaluation data enters a spool or the ledger of training: its episodes are only counted here, all that were started.
What the policy failed at has the reward that its domain sets; a fault of the infrastructure is played again, and
counted apart only if that fails too: a mean over the survivors would flatter the policy. The episodes take the room
that training leaves, and run one at a time where it leaves none.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from hpcrl.campaign_dir.events import CampaignEvent, EvaluationFinished, FaultReported
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig, Recipe
from hpcrl.errors import EnvFault
from hpcrl.learn.evaluations import (
    EvaluationPart,
    EvaluationResult,
    EvaluationRound,
    EvaluationStore,
    is_round_due,
    merge_parts,
)
from hpcrl.rollout.tasks import AgentTask, make_held_out_task
from hpcrl.spool.outcome import OUTCOME_UNPLAYED, name_outcome
from hpcrl.spool.record import TRAINABLE, Trajectory

ROUND_POLL_INTERVAL_S = 0.5
"""The interval at which the directory is read."""
RETRY_PAUSE_S = 30.0
"""The pause after a disk has failed."""
ENGINES_TIMEOUT_S = 30.0
"""The time a round waits for all engines to serve its version; the result records which versions were used."""

MAX_EPISODE_ATTEMPTS = 3
"""The number of times that an episode is played that ends in a fault of the infrastructure."""

PlayEpisode = Callable[[AgentTask, int, str, DomainConfig], Awaitable[Trajectory]]
"""Runs one episode: called with the held-out task, the episode's index, the domain's name and its settings."""
ScoreTrajectory = Callable[[str, Trajectory], Awaitable[Trajectory]]


@dataclass(frozen=True, kw_only=True)
class EvaluationHooks:
    """The calls that the runner makes to the env worker."""

    play: PlayEpisode
    score: ScoreTrajectory
    emit: Callable[[CampaignEvent], None]
    oldest_version: Callable[[], int]
    """The oldest version that engines serve."""


@dataclass
class _RoundProgress:
    """This worker's share of the current round."""

    round: EvaluationRound
    started_at: float
    not_started: deque[tuple[str, int]]
    rewards: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: int = 0
    num_faults: int = 0
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def summary(self) -> EvaluationPart:
        return EvaluationPart(
            rewards=self.rewards,
            num_tokens=self.num_tokens,
            num_faults=self.num_faults,
            outcomes=self.outcomes,
            oldest=min(self.versions, default=None),
            newest=max(self.versions, default=None),
        )


class EvaluationRunner:
    """Runs the evaluations of one env worker; `poll` it often, `close` it at the end."""

    def __init__(
        self, recipe: Recipe, worker: EnvWorkerId, *, job: int, record: EvaluationStore, hooks: EvaluationHooks
    ) -> None:
        self._recipe = recipe
        self._worker = worker
        self._job = job
        self._record = record
        self._hooks = hooks
        self._domains = list_evaluated_domains(recipe)
        self._last_result: EvaluationResult | None = None
        """The last concluded round, as worker 0 has received it."""
        self._progress: _RoundProgress | None = None
        self._playing: set[asyncio.Task[None]] = set()
        self._polled_at = self._paused_until = float("-inf")

    def poll(self, *, version: int, room: int, now: float) -> None:
        """Start what is due. `version` is the newest; `room` is how many episodes training leaves room for."""
        if now < self._paused_until:
            return
        try:
            self._poll(version=version, room=room, now=now)
        except OSError as error:  # a full or failing disk must not end the training
            self._paused_until = now + RETRY_PAUSE_S
            self._hooks.emit(FaultReported(what="evaluation", detail=f"{error}: next try in {RETRY_PAUSE_S:g} s"))

    def _poll(self, *, version: int, room: int, now: float) -> None:
        if now - self._polled_at >= ROUND_POLL_INTERVAL_S:
            self._polled_at = now
            if self._worker.index == 0:
                self._lead_rounds(version)
            self._start_share(now)
        progress = self._progress
        if progress is None or not self._are_engines_ready(progress, now):
            return
        while progress.not_started and len(self._playing) < max(room, 1):
            name, index = progress.not_started.popleft()
            episode = asyncio.create_task(self._play_episode(progress, name, index))
            self._playing.add(episode)
            episode.add_done_callback(self._playing.discard)
        if not progress.not_started and not self._playing:
            self._record.save_part(progress.summary(), round=progress.round, env_index=self._worker.index)
            self._progress = None

    async def close(self) -> None:
        """Cancel what runs; an interrupted round has no result, and the next job starts another."""
        for episode in self._playing:
            episode.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    def _lead_rounds(self, version: int) -> None:
        """Conclude the round that has all its parts, or start the one that is due (worker 0 only)."""
        record, round = self._record, self._record.current_round()
        if self._last_result is None:
            self._last_result = record.last_result()
        if round is not None and round.job == self._job and not record.has_result(round):
            parts = record.parts(round, num_env_workers=self._worker.count)
            if parts is not None:
                self._conclude(merge_parts(round, parts))
        elif is_round_due(self._last_result, newest=version, every=self._recipe.evaluation.every_versions):
            record.start_round(job=self._job, version=version)

    def _conclude(self, result: EvaluationResult) -> None:
        # The event comes first: a worker that dies in between emits it again, under the same number.
        self._hooks.emit(EvaluationFinished(**msgspec.structs.asdict(result)))
        self._record.save_result(result)
        self._last_result = result

    def _start_share(self, now: float) -> None:
        """Start this worker's share of the current round, unless it is done or in progress."""
        if self._progress is not None:
            return
        round = self._record.current_round()
        if round is None or round.job != self._job or self._record.has_part(round, env_index=self._worker.index):
            return
        episodes = [(name, index) for name in self._domains for index in range(self._recipe.evaluation.num_episodes)]
        self._progress = _RoundProgress(
            round=round, started_at=now, not_started=deque(episodes[self._worker.index :: self._worker.count])
        )

    def _are_engines_ready(self, progress: _RoundProgress, now: float) -> bool:
        return self._hooks.oldest_version() >= progress.round.version or now - progress.started_at > ENGINES_TIMEOUT_S

    async def _play_episode(self, progress: _RoundProgress, name: str, index: int) -> None:
        task = make_held_out_task(name, recipe_seed=self._recipe.seed, round=progress.round.number, index=index)
        trajectory = await self._play_until_scored(task, index, name)
        counts = progress.outcomes.setdefault(name, {})
        outcome = "env-fault" if trajectory is None else name_outcome(trajectory.status, trajectory.outcome)
        counts[outcome] = counts.get(outcome, 0) + 1
        if trajectory is None:
            progress.num_faults += 1
        elif trajectory.reward is not None:
            progress.rewards.setdefault(name, []).append(trajectory.reward)
            progress.num_tokens += len(trajectory)
            progress.versions += {int(version) for version in trajectory.versions[trajectory.loss_mask]}

    async def _play_until_scored(self, task: AgentTask, index: int, name: str) -> Trajectory | None:
        """Return the episode with its reward, or without one if it had no turn; None if every attempt was a fault."""
        for _ in range(MAX_EPISODE_ATTEMPTS):
            try:
                trajectory = await self._hooks.play(task, index, name, self._domains[name])
                if trajectory.outcome == OUTCOME_UNPLAYED:
                    return trajectory
                return await self._score_trajectory(name, trajectory)
            except Exception as error:  # noqa: BLE001 - one bad episode must not end the round
                detail = f"{type(error).__name__}: {error}"
                self._hooks.emit(FaultReported(what="evaluation", detail=detail, id=task.episode(index)))
        return None

    async def _score_trajectory(self, name: str, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with its reward; raise EnvFault for a fault of the infrastructure."""
        if trajectory.status in TRAINABLE:
            trajectory = await self._hooks.score(name, msgspec.structs.replace(trajectory, domain=name))
        if trajectory.status not in TRAINABLE or trajectory.reward is None:
            raise EnvFault(f"{trajectory.status}: {trajectory.extra.get('fault', 'no reason was recorded')}")
        return trajectory


def list_evaluated_domains(recipe: Recipe) -> dict[str, DomainConfig]:
    """Return the domains that are evaluated, with the environment options that apply during evaluation."""
    names = recipe.evaluation.domains or list(recipe.domains)
    more_options = recipe.evaluation.options
    return {
        name: msgspec.structs.replace(
            recipe.domains[name], options={**recipe.domains[name].options, **more_options.get(name, {})}
        )
        for name in names
    }
