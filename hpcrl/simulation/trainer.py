"""The trainer in simulated time (`SimulatedTrainer`): it chooses groups as a real one, and steps take time."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpcrl.config.recipe import Recipe
from hpcrl.learn.group_choice import choose_groups
from hpcrl.rollout.flow_control import allows_version, find_start_versions, should_await_rewards
from hpcrl.simulation.clock import EventQueue
from hpcrl.spool.outcome import is_too_old
from hpcrl.spool.record import Trajectory
from hpcrl.system.processes import do_nothing


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A training step of a simulation."""

    started_at: float
    ended_at: float
    waited_s: float
    """The time before it in which the trainer had nothing to train on."""
    num_tokens: int
    lags: Counter[int]


@dataclass
class SimulatedTrainer:
    """The trainer."""

    queue: EventQueue
    recipe: Recipe
    estimate_s: Callable[[list[Trajectory]], float]
    """Returns the time of a step on these trajectories."""
    publish: Callable[[int], object]
    """Called with each new version."""
    list_holds: Callable[[], Iterable[int | None]]
    """Returns the versions that env workers do not want passed yet."""
    drop: Callable[[list[Trajectory]], object]
    """Called with trajectories that are never trained on."""
    count_tokens: Callable[[list[Trajectory]], int]
    """Called with the trajectories of a step; returns their tokens."""
    find_worker: Callable[[Trajectory], str]
    """Returns the env worker that has played a trajectory."""
    version: int = 0
    waiting: Counter[str] = field(default_factory=Counter)
    """Durable trajectories that are not settled, by the env worker that played them."""
    unscored: list[Trajectory] = field(default_factory=list)
    """Durable trajectories whose rewards it may wait for."""
    steps: list[SimulatedStep] = field(default_factory=list)
    step_end: float | None = None
    """The time when the step that runs will end; None if none does."""
    chosen: list[Trajectory] = field(default_factory=list)
    """The trajectories of that step."""
    is_draining: bool = False
    on_idle: Callable[[], object] = do_nothing
    """Called when a step has ended."""
    _waiting: list[Trajectory] = field(default_factory=list)
    _idle_since: float = 0.0
    _looked_at: int = -1
    """The version at which the waiting trajectories were last looked through."""

    def offer(self, trajectories: list[Trajectory]) -> None:
        """Add trajectories that have their reward."""
        self._waiting += trajectories
        arrived = {one.id for one in trajectories}
        self.unscored = [one for one in self.unscored if one.id not in arrived]
        max_lag = self.recipe.rollout.max_lag
        if any(is_too_old(one.start_version, newest=self.version, max_lag=max_lag) for one in trajectories):
            self._looked_at = -1
        self.try_step()

    def resume(self) -> None:
        """Train again, in the next job."""
        self.is_draining, self._idle_since = False, self.queue.now
        self.try_step()

    def try_step(self) -> None:
        """Start a step if there are enough groups, no env worker asks to wait, and no rewards are awaited."""
        train, rollout = self.recipe.train, self.recipe.rollout
        if self.step_end is not None or self.is_draining:
            return
        has_batch = len(self._waiting) >= train.groups_per_step * rollout.group_size
        is_allowed = has_batch and all(allows_version(limit, self.version + 1) for limit in self.list_holds())
        if not is_allowed and self._looked_at == self.version:  # nothing becomes stale while it waits
            return
        self._looked_at = self.version
        choice = choose_groups(
            self._waiting,
            groups_per_step=train.groups_per_step,
            group_size=rollout.group_size,
            version=self.version,
            max_lag=rollout.max_lag,
            consumed=(),
        )
        if choice.stale:
            self._waiting = [*choice.chosen, *choice.rest]
            self._settle(choice.stale)
            self.drop(choice.stale)
        if choice.chosen and is_allowed and not self._should_await_rewards(choice.chosen):
            self._waiting = choice.rest
            self._start(choice.chosen)

    def _should_await_rewards(self, chosen: list[Trajectory]) -> bool:
        unscored = find_start_versions(self.unscored)
        return should_await_rewards(unscored, chosen, version=self.version, max_lag=self.recipe.rollout.max_lag)

    def _settle(self, trajectories: list[Trajectory]) -> None:
        self.waiting.subtract(self.find_worker(one) for one in trajectories)

    def abandon_step(self) -> None:
        """End the step that runs without its result; its trajectories are chosen from again."""
        self._waiting = [*self.chosen, *self._waiting]
        self.chosen, self.step_end = [], None
        self._looked_at = -1

    def _start(self, chosen: list[Trajectory]) -> None:
        started_at, waited_s = self.queue.now, self.queue.now - self._idle_since
        self.chosen, self.step_end = chosen, started_at + self.estimate_s(chosen)
        lags = Counter(self.version - one.start_version for one in chosen)

        def end() -> None:
            if self.chosen is not chosen:  # the step was abandoned
                return
            step = SimulatedStep(
                started_at=started_at,
                ended_at=self.queue.now,
                waited_s=waited_s,
                num_tokens=self.count_tokens(chosen),
                lags=lags,
            )
            self.steps.append(step)
            self.chosen, self.step_end, self._idle_since = [], None, self.queue.now
            self._settle(chosen)
            self.version += 1
            self.publish(self.version)
            self.on_idle()
            self.try_step()

        self.queue.call_at(self.step_end, end)
